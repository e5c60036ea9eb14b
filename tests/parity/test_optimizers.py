"""Every optimizer through a session: the bits of its rule, wherever state lives."""

import pytest
import torch
from parity.models import SmallGPT, build, loss_of
from parity.oracle import same_bits
from parity.rule_oracle import RULE_CASES, RULE_IDS, RuleReference
from parity.sessions import PLACEMENTS, open_session, use_small_records

from offload.errors import ConfigError, StoreError

pytestmark = pytest.mark.slow  # seconds in all; `make test` has others of their kind


@pytest.fixture(autouse=True)
def small_records(monkeypatch):
    use_small_records(monkeypatch)


def train_steps(model, optimizer, steps):
    for index in steps:
        loss_of(model, index).backward()
        optimizer.step()
        optimizer.zero_grad()


def trained_reference(rule, options, steps, dtype):
    reference = RuleReference(build(SmallGPT, dtype=dtype), rule, options)
    for index in steps:
        loss_of(reference.model, index).backward()
        reference.step()
        reference.model.zero_grad()
    return reference


@pytest.mark.parametrize(
    ("name", "rule", "options", "dtype"),
    # In fp32 plain SGD keeps nothing at all: records of no bytes.
    [(*case, torch.bfloat16) for case in RULE_CASES]
    + [(*case, torch.float32) for case in RULE_CASES if case[1] in ("sgd", "lion")],
    ids=[*RULE_IDS, "lion-fp32", "sgd-fp32"],
)
def test_state_equals_that_of_the_rule_in_every_tier(tmp_path, name, rule, options, dtype):
    reference = trained_reference(rule, options, range(3), dtype)

    for placement in PLACEMENTS:
        with open_session(tmp_path, placement, budget_bytes=2 << 20) as session:
            model = session.wrap(build(SmallGPT, dtype=dtype))
            optimizer = getattr(session, name)(model.parameters(), **options)
            train_steps(model, optimizer, range(3))

            assert session.state_digest() == reference.digest()


@pytest.mark.parametrize(("name", "rule", "options"), RULE_CASES, ids=RULE_IDS)
def test_a_resumed_session_goes_on_with_the_same_optimizer_only(tmp_path, name, rule, options):
    reference = trained_reference(rule, options, range(4), torch.bfloat16)
    with open_session(tmp_path) as session:
        model = session.wrap(build(SmallGPT))
        train_steps(model, getattr(session, name)(model.parameters(), **options), range(2))
        session.commit()

    with open_session(tmp_path, resume=True) as session:
        model = session.wrap(build(SmallGPT, seed=1))
        with pytest.raises(StoreError, match=f"found the state of `{rule}` after 2 steps"):
            session.AdamW(model.parameters())
        train_steps(model, getattr(session, name)(model.parameters(), **options), range(2, 4))

        assert session.state_digest() == reference.digest()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("AdamW", {"amsgrad": True}, "AdamW with `amsgrad`.*third moment"),
        ("Adam", {"amsgrad": True}, "Adam with `amsgrad`"),
        ("Adam", {"maximize": True}, "negate the loss"),
        ("SGD", {"nesterov": True}, "`nesterov`: expected `momentum` above 0"),
        ("SGD", {"momentum": -0.1}, "`momentum` = -0.1: expected 0 or more"),
        ("Lion", {"betas": (0.9, 1.0)}, "`betas`.*between 0 and 1, 1 excluded"),
        ("Lion", {"eps": 1e-8}, "Lion with option `eps`"),
        ("Adagrad", {"lr": -1.0}, "`lr` = -1.0"),
        ("Muon", {}, 'make the session with `optimizer="muon"`.*elements of module lists'),
    ],
)
def test_wrong_options_are_refused(tmp_path, name, options, message):
    with open_session(tmp_path) as session:
        model = session.wrap(build(SmallGPT))

        with pytest.raises(ConfigError, match=message):
            getattr(session, name)(model.parameters(), **options)


def test_options_of_torch_that_ask_for_nothing_are_accepted(tmp_path):
    with open_session(tmp_path) as session:
        model = session.wrap(build(SmallGPT))

        session.Adam(model.parameters(), amsgrad=False, maximize=False, foreach=None)


@pytest.mark.parametrize("option", ["amsgrad", "maximize"])
@pytest.mark.parametrize("overlap", ["none", "forward"])
def test_an_option_that_an_edit_of_a_param_group_asks_for_is_refused(tmp_path, overlap, option):
    with open_session(tmp_path, overlap=overlap) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters())
        train_steps(model, optimizer, range(1))
        before = session.state_digest()
        optimizer.param_groups[0][option] = True

        with pytest.raises(ConfigError, match=f"AdamW with `{option}` = True"):
            train_steps(model, optimizer, range(1))

        assert session.state_digest() == before


class TorchMuon:
    """`torch.optim.Muon` over the matrices of the blocks, `torch.optim.AdamW` over the rest."""

    def __init__(self, model, *, lr, weight_decay):
        matrices, rest = [], []
        for name, parameter in model.named_parameters():
            is_matrix = name.startswith("blocks.") and parameter.dim() == 2
            (matrices if is_matrix else rest).append(parameter)
        self.optimizers = [
            torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay),
            torch.optim.AdamW(rest, lr=lr, weight_decay=weight_decay, betas=(0.9, 0.95)),
        ]

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()


@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
def test_muon_equals_torch_muon_in_fp32(tmp_path, placement):
    options = {"lr": 0.01, "weight_decay": 0.1}
    plain = build(SmallGPT, dtype=torch.float32)
    reference = TorchMuon(plain, **options)

    with open_session(tmp_path, placement, budget_bytes=4 << 20, optimizer="muon") as session:
        model = session.wrap(build(SmallGPT, dtype=torch.float32))
        optimizer = session.Muon(model.parameters(), **options)
        # One step: gradients of later ones would differ by what AdamW rounds otherwise.
        for trained, stepper in ((plain, reference), (model, optimizer)):
            train_steps(trained, stepper, range(1))

        pairs = zip(plain.named_parameters(), session_values(session, model), strict=True)
        for (name, expected), found in pairs:
            if name.startswith("blocks.") and expected.dim() == 2:
                # docs/numerics.md: the same operations in the same order.
                assert same_bits(found, expected.detach()), name
            else:
                torch.testing.assert_close(found, expected.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False, "momentum": 0.8, "ns_steps": 3, "weight_decay": 0.3},
        {"adjust_lr_fn": "match_rms_adamw", "ns_coefficients": (3.0, -4.0, 2.0)},
    ],
)
def test_muon_stays_torch_muon_over_steps_whatever_its_options(tmp_path, options):
    plain = build(SmallGPT, dtype=torch.float32)
    with open_session(tmp_path, budget_bytes=4 << 20, optimizer="muon") as session:
        model = session.wrap(build(SmallGPT, dtype=torch.float32))
        for module in (plain, model):  # gradients stay equal: nothing is rounded otherwise
            for name, parameter in module.named_parameters():
                is_matrix = name.startswith("blocks.") and parameter.dim() == 2
                parameter.requires_grad_(is_matrix)
        reference = torch.optim.Muon([p for p in plain.parameters() if p.requires_grad], **options)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = session.Muon(trained, **options)

        train_steps(plain, reference, range(4))
        train_steps(model, optimizer, range(4))

        pairs = zip(plain.parameters(), session_values(session, model), strict=True)
        assert all(same_bits(found, expected.detach()) for expected, found in pairs)


def session_values(session, model):
    return [parameter.detach().clone() for parameter in model.state_dict().values()]


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str
)
def test_muon_gives_the_same_state_in_every_tier_and_resumed(tmp_path, dtype):
    digests = []
    for placement in PLACEMENTS:
        with open_session(tmp_path, placement, budget_bytes=4 << 20, optimizer="muon") as session:
            model = session.wrap(build(SmallGPT, dtype=dtype))
            train_steps(model, session.Muon(model.parameters(), lr=0.01), range(4))
            digests.append(session.state_digest())
    options = {"budget_bytes": 4 << 20, "optimizer": "muon"}
    with open_session(tmp_path / "parts", **options) as session:
        model = session.wrap(build(SmallGPT, dtype=dtype))
        train_steps(model, session.Muon(model.parameters(), lr=0.01), range(2))
        session.commit()
    with open_session(tmp_path / "parts", resume=True, **options) as session:
        model = session.wrap(build(SmallGPT, seed=1, dtype=dtype))
        train_steps(model, session.Muon(model.parameters(), lr=0.01), range(2, 4))
        digests.append(session.state_digest())

    assert len(set(digests)) == 1


def test_a_matrix_that_is_laid_out_apart_needs_muon(tmp_path):
    with open_session(tmp_path, budget_bytes=4 << 20, optimizer="muon") as session:
        model = session.wrap(build(SmallGPT))

        with pytest.raises(ConfigError, match='without `optimizer="muon"`'):
            session.AdamW(model.parameters())


@pytest.mark.parametrize(
    "name",
    [
        "lion",
        "muon",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("adam", "sgd", "adagrad")),
    ],
)
def test_a_configured_run_trains_with_the_optimizer_it_names(tmp_path, small_config, train, name):
    changes = {"optimizer__name": f'"{name}"', "train__steps": 2, "tiers__host__memory": "24MiB"}
    if name == "sgd":
        changes |= {"optimizer__momentum": 0.9, "optimizer__nesterov": True}

    offloaded = train(small_config(**changes), run_dir=tmp_path / "offloaded")
    in_memory = train(small_config(offload=False, **changes), run_dir=tmp_path / "memory")

    assert offloaded.state_digest == in_memory.state_digest
    assert offloaded.losses == in_memory.losses
