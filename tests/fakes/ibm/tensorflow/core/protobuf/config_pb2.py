"""Messages with IBM's two fields; like protocol buffers they know no others and take no other types."""

from typing import Any


class _Message:
    fields = {}  # type: dict[str, Any]

    def __init__(self, **given: Any) -> None:
        for name, default in self.fields.items():
            object.__setattr__(self, name, default() if isinstance(default, type) else default)
        for name, value in given.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.fields:
            raise AttributeError(f"Protocol message {type(self).__name__} has no {name!r} field.")
        default = self.fields[name]
        if isinstance(default, type):
            raise AttributeError(f"Assignment not allowed to message field {name!r}.")  # noqa: TRY004
        if type(value) is not type(default):
            raise TypeError(f"{value!r} has type {type(value)}, but expected {type(default)}")
        object.__setattr__(self, name, value)

    def CopyFrom(self, other: "_Message") -> None:  # noqa: N802
        if type(other) is not type(self):
            raise TypeError(f"Parameter to CopyFrom() must be instance of same class: {type(self).__name__}")
        for name, default in self.fields.items():
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(default, type):
                mine.CopyFrom(theirs)
            else:
                object.__setattr__(self, name, theirs)


class Experimental(_Message):
    fields = {"lms_enabled": False, "lms_defrag_enabled": False}


class GPUOptions(_Message):
    fields = {"experimental": Experimental, "allow_growth": False}


class ConfigProto(_Message):
    fields = {"gpu_options": GPUOptions, "log_device_placement": False}
