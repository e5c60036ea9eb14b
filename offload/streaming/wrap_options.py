"""How a model is wrapped: what the session asks of it."""

from dataclasses import dataclass, field
from typing import Literal

from offload.plan.gradients import may_spill
from offload.plan.host import Placement
from offload.plan.window import WINDOW_BYTES
from offload.streaming.activations import ActivationOptions
from offload.streaming.unit_modules import UnitRules


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """What a model finds in its session.

    Attributes:
        host_bytes: Of the host tier, that other models have.
        device_bytes: The same of the device tier.
        has_host_part: Whether the user gave it a part of the host tier.
        has_device_part: The same of the device tier.
    """

    host_bytes: int = 0
    device_bytes: int = 0
    has_host_part: bool = False
    has_device_part: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WrapOptions:
    """How a model is wrapped.

    Attributes:
        budget_bytes: Of the host tier; None: as much as the model needs.
        device_budget_bytes: Of the device tier; None: a co-resident set and what is prefetched.
        rule: The update rule for which state is planned.
        units: What the user says about units.
        name: Of a model beside the one without a name: its records begin with it, and it takes no
            more of the budgets than what it needs and what is fetched ahead.
        matrices: Glob patterns of the parameters that are updated as whole matrices.
        window_bytes: Of records that are read, updated and written at one time, at most.
    """

    budget_bytes: int | None
    device_budget_bytes: int | None = None
    parameters: Placement
    optimizer: Placement
    codec: str
    rule: str
    matrices: tuple[str, ...]
    gradient_dtype: Literal["parameter", "float32"]
    prefetch_distance: int
    is_training: bool
    activations: ActivationOptions = field(default_factory=ActivationOptions)
    units: UnitRules | None = None
    name: str | None = None
    overlap: str = "none"
    beside: Beside = field(default_factory=Beside)
    window_bytes: int = WINDOW_BYTES

    def is_streamed(self, *, is_unified: bool) -> bool:
        """Tells whether units come and go where the device computes."""
        return self.parameters == "storage" or (self.parameters == "host" and not is_unified)

    @property
    def spills_gradients(self) -> bool:
        """Whether gradients may go to storage."""
        return may_spill(self.parameters, self.optimizer, overlap=self.overlap)
