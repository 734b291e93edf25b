"""Bring lmsrun into the user's interpreter: one self-contained file for Python 3.6 and later.

The per-rank shim puts this folder in front of ``PYTHONPATH``, so ``site`` imports this file in place of the
user's own ``sitecustomize``, which it then runs as if we had not been there. A rank's first import of
TensorFlow makes its GPU visible and switches Large Model Support on; ``hvd.init()`` reads the binding back.
Both leave a receipt for the launcher.

Every Python of the job pays for this file, so the top of it imports nothing that the interpreter has not
loaded yet. No failure in here may stop a program: it becomes a note in the receipt, and a line on stderr when
lmsrun is verbose.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_NAME = "_lmsrun_bootstrap"
_TRUE = ("1", "true", "yes", "on")
_OLDEST_FOR_GRAPH = (3, 10)

STRATEGY = "tensorflow.python.distribute.collective_all_reduce_strategy"

_notes = []  # type: list[str]
_moves = []  # type: list[dict[str, int]]


# --- the start of the interpreter -------------------------------------------------------------------------


def start(environ: "Mapping[str, str]") -> None:
    """Watch for the imports that matter in a rank; elsewhere do nothing."""
    in_rank = any(
        environ.get(name) for name in ("LMSRUN_JOB_ID", "LMSRUN_EXPECT", "LMS_ENABLED", "LMSRUN_FIT")
    )
    if not in_rank or _NAME in sys.modules:
        return
    sys.modules[_NAME] = sys.modules[__name__]
    if environ.get("LMSRUN_LINE_BUFFERED") and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    hooks = {"tensorflow": on_tensorflow, "horovod.common.basics": on_horovod, STRATEGY: on_strategy}
    sys.meta_path.insert(0, Watcher(hooks))


def run_users_own() -> None:
    """Import the ``sitecustomize`` that Python would have found without us, in our place.

    Whatever it raises goes to ``site``, which reports it as it would have done without us.
    """
    sys.path[:] = [entry for entry in sys.path if not _is_ours(entry)]
    ours = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        if ours is not None:
            sys.modules["sitecustomize"] = ours


def _is_ours(entry: str) -> bool:
    return bool(entry) and os.path.realpath(entry) == os.path.realpath(_HERE)


class Watcher:
    """A meta path finder that finds nothing itself.

    It hands the first import of a watched module to wrapt's post-import hooks; until then an import costs
    one dictionary look-up, and wrapt need not be there.
    """

    def __init__(self, hooks: "dict[str, Callable[[ModuleType], None]]") -> None:
        self._hooks = hooks

    def find_spec(self, fullname: str, path: "object" = None, target: "object" = None) -> "ModuleSpec | None":
        """Register the hook of ``fullname``, if it is watched, and let the other finders find the module."""
        hook = self._hooks.pop(fullname, None)
        if hook is None:
            return None
        try:
            import importlib.util

            import wrapt

            wrapt.register_post_import_hook(hook, fullname)
            return importlib.util.find_spec(fullname)
        except ImportError as error:
            note(f"nothing was done on the import of {fullname}: {error}")
            return None


def note(text: str) -> None:
    """Keep a line for the receipt; show it when lmsrun is verbose."""
    _notes.append(text)
    if os.environ.get("LMSRUN_VERBOSE"):
        sys.stderr.write(f"lmsrun: {text}\n")


# --- TensorFlow has been imported -------------------------------------------------------------------------


def on_tensorflow(tensorflow: "Any") -> None:
    """Make this rank's GPU the visible one, switch LMS on, and say so in the ``framework`` receipt."""
    visible = []  # type: list[str]
    lms = {"requested": "off", "active": False, "mode": "off", "why": "switching it on failed"}  # type: dict[str, Any]
    try:
        visible = show_own_gpu(tensorflow, os.environ)
    except Exception as error:
        note(f"GPU selection failed: {_one_line(error)}")
    try:
        lms = switch_lms_on(tensorflow, os.environ)
    except Exception as error:
        lms["why"] = _one_line(error)
    version = getattr(tensorflow, "__version__", None)
    ends_rank = lms.pop("ends_rank", False)
    write_receipt("framework", {"tensorflow": version, "visible_gpus": visible, "lms": lms}, os.environ)
    if lms["mode"] != "graph" and os.environ.get("LMSRUN_FIT"):
        is_off = lms["requested"] == "off"
        refuse_fit("the program has switched Large Model Support off" if is_off else lms["why"], os.environ)
    if ends_rank:
        sys.exit(f"lmsrun: Large Model Support cannot be switched on: {lms['why']}")


def refuse_fit(why: str, environ: "Mapping[str, str]") -> None:
    """End a process of ``lmsrun fit`` in which nothing would catch the training step: it would train."""
    import json

    draft = "{}.{}".format(environ["LMSRUN_FIT"], os.getpid())
    with open(draft, "w") as file:
        json.dump({"fault": why}, file)
    os.replace(draft, environ["LMSRUN_FIT"])
    sys.exit(1)


def show_own_gpu(tensorflow: "Any", environ: "Mapping[str, str]") -> "list[str]":
    """Hide every GPU but this rank's; return the names that stay visible.

    Memory grows as it is needed, unless LMS plans it and the rank has its GPU to itself: TensorFlow's pool is
    one region then. One that grows is made of regions, and each buffer has to lie in one of them.
    """
    config = tensorflow.config
    if not hasattr(config, "list_physical_devices"):  # TensorFlow 2.0 and 1.15
        config = config.experimental
    gpus = config.list_physical_devices("GPU")
    if not gpus:
        return []
    tokens = environ.get("LMSRUN_GPUS")
    listed = environ.get("CUDA_VISIBLE_DEVICES") or environ.get("HIP_VISIBLE_DEVICES")
    position, why = choose_gpu(len(gpus), tokens, listed, local_rank(environ))
    if why:
        note(why)
    mine = list(gpus) if position is None else [gpus[position]] if position >= 0 else []
    if len(mine) != len(gpus):
        config.set_visible_devices(mine, "GPU")
    if position is None or not (
        plans_memory(tensorflow, environ) and owns_gpu(tokens or "", local_size(environ))
    ):
        for gpu in mine:
            tensorflow.config.experimental.set_memory_growth(gpu, True)
    return [gpu.name for gpu in mine]


def owns_gpu(tokens: str, ranks: "int | None") -> bool:
    """Tell whether none of this host's ranks shares its GPU with another one; MIG devices never are shared.

    Args:
        tokens: The job's GPUs of this host in rank order, or this rank's MIG device.
        ranks: How many ranks the job has on this host, if known.
    """
    job = [token.strip() for token in tokens.split(",") if token.strip()]
    if job and all(token.startswith("MIG-") for token in job):
        return True
    return ranks is not None and ranks <= len(set(job)) == len(job)


def choose_gpu(
    count: int, tokens: "str | None", visible: "str | None", own_local_rank: "int | None"
) -> "tuple[int | None, str]":
    """Find which of TensorFlow's ``count`` GPUs belongs to this rank.

    Args:
        count: How many GPUs TensorFlow lists, at least one.
        tokens: ``LMSRUN_GPUS``: the job's GPUs of this host in rank order; None: the user chooses.
        visible: ``CUDA_VISIBLE_DEVICES``, which numbers the GPUs that TensorFlow lists.
        own_local_rank: This rank's number on its host, if known.

    Returns:
        A position, -1 for no GPU, None for leaving all of them visible; and a reason where it needs one.
    """
    job = [token.strip() for token in tokens.split(",") if token.strip()] if tokens is not None else None
    if job is None:
        return None, ""
    if not job:
        return -1, ""
    if own_local_rank is None:
        return None, f"this rank's local rank is unknown: all {count} GPUs stay visible"
    mine = job[own_local_rank % len(job)]
    listed = [token.strip() for token in (visible or "").split(",") if token.strip()]
    if mine in listed and listed.index(mine) < count:
        return listed.index(mine), ""
    if count == 1:
        return 0, ""
    if count == len(job):
        return own_local_rank % len(job), ""
    if not listed and mine.isdigit() and int(mine) < count:
        return int(mine), ""
    return None, f"GPU {mine} is not among the {count} that TensorFlow lists: all of them stay visible"


def switch_lms_on(tensorflow: "Any", environ: "Mapping[str, str]") -> "dict[str, Any]":
    """Switch Large Model Support on as ``LMS_*`` asks; return the receipt's account of it.

    ``ends_rank`` is in it where something that the job names (a folder for tensors, a file) cannot be had.
    """
    requested = requested_mode(environ)
    account = {"requested": requested, "active": False, "mode": "off", "why": "not asked for"}  # type: dict[str, Any]
    if requested == "off":
        lend_names(tensorflow)
        return account
    if requested not in ("auto", "native", "graph"):
        account["why"] = f"LMS_MODE is {requested!r}; needed auto, native, graph or off"
        return account
    try:
        if requested != "graph" and has_native(tensorflow):
            enable_native(tensorflow, environ.get("LMS_DEFRAG", "").strip().lower() in _TRUE)
            account.update(active=True, mode="native", why="TensorFlow's own large model support is on")
        elif sys.version_info < _OLDEST_FOR_GRAPH:
            account["why"] = (
                f"no set_lms_enabled here, and mode graph needs Python 3.10; found 3.{sys.version_info[1]}"
            )
        else:
            state = load_lms(os.path.dirname(_HERE)).enable()
            account.update(active=state.active, mode=state.mode, why=state.why)
    except Exception as error:
        if getattr(error, "ends_rank", False):
            account.update(ends_rank=True, why=str(error))
        else:
            account["why"] = _one_line(error)
    return account


def requested_mode(environ: "Mapping[str, str]") -> str:
    """Return the mode of Large Model Support that is asked for, as it was written; ``off`` without any."""
    enabled = environ.get("LMS_ENABLED", "").strip().lower() in _TRUE
    return (environ.get("LMS_MODE", "").strip() or "auto") if enabled else "off"


def plans_memory(tensorflow: "Any", environ: "Mapping[str, str]") -> bool:
    """Tell whether mode ``graph`` is asked for, or what ``auto`` comes to here."""
    mode = requested_mode(environ)
    return mode == "graph" or (mode == "auto" and not has_native(tensorflow))


def lend_names(tensorflow: "Any") -> None:
    """Let a script that was written for IBM's TensorFlow or package find its names while LMS is off."""
    if has_native(tensorflow) or sys.version_info < _OLDEST_FOR_GRAPH:
        return
    import importlib

    try:
        load_lms(os.path.dirname(_HERE))
        importlib.import_module("lms.compat").install(tensorflow)
    except (ImportError, RuntimeError) as error:
        note(f"IBM's names for LMS are not there: {_one_line(error)}")


def load_lms(package: str) -> "Any":
    """Import our ``lms`` package from its folder, wherever the program's own modules lie.

    Raises:
        RuntimeError: If the program has another module of that name: the program's comes first.
    """
    import importlib.util
    from importlib.machinery import PathFinder

    ours = os.path.join(package, "__init__.py")
    loaded = sys.modules.get("lms")
    found = getattr(loaded, "__spec__", None) if loaded is not None else PathFinder.find_spec("lms", sys.path)
    if loaded is not None or found is not None:
        place = _code_of(found)
        if place is not None and os.path.realpath(place) != os.path.realpath(ours):
            raise RuntimeError(f"the program has its own module named lms ({place}); rename it to use LMS")
    if loaded is not None:
        return loaded
    spec = importlib.util.spec_from_file_location("lms", ours, submodule_search_locations=[package])
    if spec is None or spec.loader is None:
        raise RuntimeError(f"cannot load {ours}")
    module = importlib.util.module_from_spec(spec)
    sys.modules["lms"] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules["lms"]
        raise
    return module


def _code_of(spec: "Any") -> "str | None":
    """Return a module's file, or its folder of code without ``__init__.py``; None for a folder of data."""
    if spec is None:
        return "no file"
    if spec.has_location and spec.origin:
        return str(spec.origin)
    for folder in spec.submodule_search_locations or ():
        if os.path.isdir(folder) and any(name.endswith(".py") for name in os.listdir(folder)):
            return str(folder)
    return None


# --- IBM's TensorFlow builds ------------------------------------------------------------------------------


def has_native(tensorflow: "Any") -> bool:
    """Tell whether this is a patched TensorFlow; our own stand-ins for IBM's names do not count."""
    setter = getattr(getattr(tensorflow.config, "experimental", None), "set_lms_enabled", None)
    return setter is not None and not str(getattr(setter, "__module__", "")).startswith("lms")


def enable_native(tensorflow: "Any", defrag: bool) -> None:
    """Switch the patched allocator's LMS on, for eager execution and for every later session.

    Raises:
        RuntimeError: If TensorFlow has already initialised its devices.
    """
    experimental = tensorflow.config.experimental
    _switch_on(experimental, "lms_enabled")
    if defrag and hasattr(experimental, "set_lms_defrag_enabled"):
        _switch_on(experimental, "lms_defrag_enabled")
    elif defrag:
        note("LMS_DEFRAG is set, but this TensorFlow has no set_lms_defrag_enabled")
    _enable_in_sessions(defrag)


def _switch_on(experimental: "Any", name: str) -> None:
    """Switch a setting on unless it is on already: a second time is refused once the devices exist."""
    getter = getattr(experimental, "get_" + name, None)
    if getter is None or not getter():
        getattr(experimental, "set_" + name)(True)


def _enable_in_sessions(defrag: bool) -> None:
    """Let every session start with the ConfigProto field set: the setter reaches eager execution only."""
    import functools
    import importlib

    session = importlib.import_module("tensorflow.python.client.session")
    protos = importlib.import_module("tensorflow.core.protobuf.config_pb2")
    original = session.BaseSession.__init__
    if getattr(original, "lms_enabled", False):
        return

    @functools.wraps(original)
    def init(self: "Any", target: "Any" = "", graph: "Any" = None, config: "Any" = None) -> None:
        own = protos.ConfigProto()
        if config is not None:
            own.CopyFrom(config)
        own.gpu_options.experimental.lms_enabled = True
        if defrag and hasattr(own.gpu_options.experimental, "lms_defrag_enabled"):
            own.gpu_options.experimental.lms_defrag_enabled = True
        original(self, target, graph, own)

    init.lms_enabled = True  # type: ignore[attr-defined]
    session.BaseSession.__init__ = init


# --- Horovod has been initialised -------------------------------------------------------------------------


def on_horovod(basics: "Any") -> None:
    """Let ``hvd.init()`` end with a receipt of where this rank really runs: libraries may have moved it.

    It also leaves word when this rank begins to exit: Horovod's own end makes its peers fail, and one of them
    may be gone first. Registered behind Horovod's handler, ours runs before it.
    """
    import atexit
    import functools

    def leave(rank_pid: int) -> None:
        # Compared by the time of its file, so that a line to a launcher elsewhere would tell nothing.
        if os.getpid() == rank_pid and os.path.isdir(os.environ.get("LMSRUN_RECEIPT_DIR", "")):
            write_receipt("exit", {}, os.environ)

    try:
        original = basics.HorovodBasics.init
    except AttributeError as error:
        note(f"this Horovod is not known, its init is not watched: {error}")
        return

    @functools.wraps(original)
    def init(self: "Any", *args: "Any", **kwargs: "Any") -> "Any":
        result = original(self, *args, **kwargs)
        try:
            binding = read_binding()
            binding.update(hvd_rank=self.rank(), hvd_size=self.size())
            write_receipt("init", binding, os.environ)
            atexit.register(leave, os.getpid())
            if os.environ.get("LMSRUN_REPLAN"):
                follow_move(self)
        except Exception as error:
            note(f"no receipt after hvd.init(): {_one_line(error)}")
        return result

    basics.HorovodBasics.init = init


def on_strategy(module: "Any") -> None:
    """Let ``MultiWorkerMirroredStrategy`` leave a receipt: where this rank runs, how many workers it has."""
    import functools

    try:
        original = module.CollectiveAllReduceExtended.__init__
    except AttributeError as error:
        note(f"this TensorFlow is not known, its strategy is not watched: {error}")
        return

    @functools.wraps(original)
    def init(self: "Any", *args: "Any", **kwargs: "Any") -> None:
        original(self, *args, **kwargs)
        try:
            binding = read_binding()
            binding["tf_size"] = int(self._num_workers)
            write_receipt("init", binding, os.environ)
        except Exception as error:
            note(f"no receipt of the strategy: {_one_line(error)}")

    module.CollectiveAllReduceExtended.__init__ = init


def follow_move(basics: "Any") -> None:
    """Bind this rank anew if Horovod Elastic has given it another place, and leave a receipt."""
    import importlib.util

    place = {
        "rank": basics.rank(),
        "size": basics.size(),
        "local_rank": basics.local_rank(),
        "local_size": basics.local_size(),
    }
    path = os.path.join(_HERE, "lmsrun_rebind.py")
    spec = importlib.util.spec_from_file_location("lmsrun_rebind", path)
    rebind = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(rebind)  # type: ignore[union-attr]
    if place == rebind.read_place(os.environ):
        return
    content = rebind.rebind(place, os.environ, read_binding)
    _moves.append(place)
    if content["reasons"] and not os.environ.get("LMSRUN_JOB_ID"):
        why = "; ".join(content["reasons"])
        sys.stderr.write(f"lmsrun: rank {place['rank']} is not bound as its new place needs: {why}\n")
    write_receipt(f"moved.{os.getpid()}.{len(_moves)}", content, os.environ)


_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236, "riscv64": 236, "ppc64le": 260, "ppc64": 260, "s390x": 269}
_MODES = {0: "none", 1: "preferred", 2: "bind", 3: "interleave", 4: "local", 5: "preferred-many"}
_MODE_FLAGS = 0xE000
_MAX_NODES = 4096  # the kernel refuses a mask that is too short for its highest possible node, at most 1023


def read_binding() -> "dict[str, Any]":
    """Read this thread's CPU mask and memory policy from the kernel; None for what cannot be read."""
    mode, nodes = _read_mempolicy(os.uname().machine)
    return {"cpus": format_ids(os.sched_getaffinity(0)), "mem_policy": mode, "mem_nodes": nodes}


def _read_mempolicy(machine: str) -> "tuple[str | None, str | None]":
    import ctypes

    number = _GET_MEMPOLICY.get(machine)
    if number is None:
        note(f"reading the memory policy is not known on {machine}")
        return None, None
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mode, mask = ctypes.c_int(), (ctypes.c_ulong * (_MAX_NODES // bits))()
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (ctypes.byref(mode), mask, ctypes.c_ulong(_MAX_NODES), None, ctypes.c_ulong(0))
    if libc.syscall(ctypes.c_long(number), *arguments) != 0:
        note(f"the memory policy cannot be read: {os.strerror(ctypes.get_errno())}")
        return None, None
    nodes = [word * bits + bit for word, value in enumerate(mask) for bit in range(bits) if value >> bit & 1]
    name = _MODES.get(mode.value & ~_MODE_FLAGS, f"mode {mode.value}")
    return name, format_ids(nodes)


def format_ids(ids: "Iterable[int]") -> str:
    """Format ids as the kernel does, ascending, runs joined: ``{0, 1, 2, 8}`` becomes ``"0-2,8"``."""
    runs = []  # type: list[list[int]]
    for value in sorted(set(ids)):
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


# --- receipts ---------------------------------------------------------------------------------------------


def write_receipt(stage: str, content: "dict[str, Any]", environ: "Mapping[str, str]") -> None:
    """Leave ``rank-<rank>.<stage>.json`` for the launcher, whole or not at all, never over an earlier one.

    The first process of a rank wins: what its children import later says nothing of the rank.
    """
    import json

    folder, rank = environ.get("LMSRUN_RECEIPT_DIR"), _rank_number(environ, "rank", ("RANK", "HOROVOD_RANK"))
    by_line = environ.get("LMSRUN_RECEIPT_LINES") and not (folder and os.path.isdir(folder))
    if rank is None or not (folder or by_line):
        return
    content = dict(content, rank=rank, pid=os.getpid())
    if _notes:
        content["notes"] = content.get("notes", []) + _notes
    if by_line:
        _send_receipt(environ.get("LMSRUN_JOB_ID", ""), rank, stage, json.dumps(content))
        return
    path = os.path.join(folder or "", f"rank-{rank}.{stage}.json")
    draft = f"{path}.{os.getpid()}.tmp"
    try:
        with open(draft, "w") as file:
            json.dump(content, file)
        os.link(draft, path)
    except FileExistsError:
        pass
    except OSError as error:
        note(f"the receipt {path} could not be written: {error}")
    try:
        os.unlink(draft)
    except OSError:
        pass


_PART_CHARS = 640  # as launch/receipts/file.py has it: what a launcher carries in one piece


def _send_receipt(job: str, rank: int, stage: str, text: str) -> None:
    """Send a receipt as marked lines on stderr, which the launcher takes out again."""
    mark = f"LMSRUN_SENT_{stage.upper()}".replace(".", "_")
    if os.environ.get(mark) == f"{job} {rank}":  # by this process or the one that started it
        return
    os.environ[mark] = f"{job} {rank}"
    parts = [text[start : start + _PART_CHARS] for start in range(0, len(text), _PART_CHARS)]
    head = f"\x1elmsrun-receipt {job} {rank} {stage} "
    try:
        for number, part in enumerate(parts):
            os.write(2, f"{head}{number}/{len(parts)} {part}\n".encode())
    except OSError:
        pass


def local_rank(environ: "Mapping[str, str]") -> "int | None":
    """Return this process's number on its host, as launcher or shim wrote it down."""
    return _rank_number(environ, "local_rank", ("LOCAL_RANK", "HOROVOD_LOCAL_RANK"))


def local_size(environ: "Mapping[str, str]") -> "int | None":
    """Return how many ranks the job has on this host, as launcher or shim wrote it down."""
    return _rank_number(environ, "local_size", ("LOCAL_WORLD_SIZE", "HOROVOD_LOCAL_SIZE"))


def _rank_number(environ: "Mapping[str, str]", key: str, names: "Iterable[str]") -> "int | None":
    import json

    try:
        return int(json.loads(environ["LMSRUN_EXPECT"])[key])
    except (KeyError, TypeError, ValueError):
        given = [environ.get(name, "") for name in names]
        return next((int(text) for text in given if text.isdigit()), None)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or "no reason given"
    return text if type(error) is RuntimeError else f"{type(error).__name__}: {text}"


MYPY = False
if MYPY:
    from collections.abc import Callable, Iterable, Mapping
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

if __name__ == "sitecustomize":
    try:
        start(os.environ)
    except Exception as error:
        note(f"the bootstrap failed: {_one_line(error)}")
    run_users_own()
