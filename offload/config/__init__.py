"""The configuration of a run: schema, presets, overrides and messages."""

from offload.config.loading import build_config, default_config, load_config, open_policy_keys
from offload.config.presets import preset_names, resolve_policy
from offload.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    PolicyConfig,
    TiersConfig,
    TrainConfig,
    UnitsConfig,
)

__all__ = [
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PolicyConfig",
    "TiersConfig",
    "TrainConfig",
    "UnitsConfig",
    "build_config",
    "default_config",
    "load_config",
    "open_policy_keys",
    "preset_names",
    "resolve_policy",
]
