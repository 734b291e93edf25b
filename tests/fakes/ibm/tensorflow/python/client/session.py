"""Sessions take a ConfigProto or nothing."""

from typing import Any

from tensorflow.core.protobuf.config_pb2 import ConfigProto


class BaseSession:
    def __init__(self, target: str = "", graph: Any = None, config: "ConfigProto | None" = None) -> None:
        if config is not None and not isinstance(config, ConfigProto):
            raise TypeError(f"config must be a tf.ConfigProto, but got {type(config)}")
        self._config = config


class Session(BaseSession):
    def __init__(self, target: str = "", graph: Any = None, config: "ConfigProto | None" = None) -> None:
        super().__init__(target, graph, config=config)
