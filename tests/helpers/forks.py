"""``python forks.py FOLDER MODULE…``: imports the modules, and then forks for each process that ``forked.py`` asks for.

A fork runs its program as the interpreter would, with another copy of our own package but for what ``SHARED`` names,
and fairseq is imported again where the program imports it. What a fork starts is a fork in the same way. So everything
is as after an exec, but for the seconds of the imports, and for what differs from process to process and not from fork
to fork: the order in sets of texts. The process ends when its input does.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import re
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, get_args

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.helpers.forked import SCRIPTS, Forked, is_python  # noqa: E402

FOLDER, MODULES = Path(sys.argv[1]), sys.argv[2:]
OURS = ("fairseq_async", "recipes", "scripts", "tests")
# What of our package is imported before all programs, which takes most of the time of their imports: layers that need
# no framework, and, where a framework is here, what plugs into it and changes nothing of it until it is called.
SHARED = ("environment", "algorithms", "options", "method", "protocol", "exchange", "records", "collective")
SHARED += ("server", "worker", "pytorch/__init__")
WITH = {"deepspeed": "deepspeed_plugin/__init__", "transformers": "pytorch/hf_trainer"}
# What a program leaves there. Hazard: what a module comes to keep must be named here, or forks of a program have it.
LEFT = {
    "errors": ["_failures"],
    "options.addresses": ["_held"],
    "worker.start.process": ["_own"],
    "worker.start.store": ["_kept"],
    "worker.start.world": ["_entered"],
    "pytorch.brought_state": ["_left"],
    "pytorch.training": ["_runs"],
    "pytorch.hf_trainer": ["_callbacks", "_divisions"],
    "deepspeed_plugin.initialize": ["_made"],
}
KEPT: set[str] = set()  # these modules
GIVEN = (str(Path(__file__).parents[2]), str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(":"))
INSTALLED = [path for path in sys.path if path not in GIVEN]
EXECVE = os.execve
BEFORE: dict[int | None, Path] = {}  # by a process's id, the folder of its fork; None: this is such a fork, or of one
OWN_RULES: set[str] = set()  # those of the package; all others are a plug-in's


class Hidden(MetaPathFinder, Loader):
    """fairseq, which is in memory and not imported: our package looks whether it is."""

    def __init__(self) -> None:
        names = [name for name in sys.modules if re.match(r"fairseq(_cli)?\b", name)]
        self.modules = {name: sys.modules.pop(name) for name in names}
        self.specs = {name: module.__spec__ for name, module in self.modules.items()}

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name not in self.modules:
            return None
        spec = ModuleSpec(name, self)
        spec.submodule_search_locations = getattr(self.specs[name], "submodule_search_locations", None)
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.specs[module.__name__]
        sys.modules.update(self.modules)
        sys.meta_path.remove(self)


def python(arguments: list[str]) -> None:
    """As the interpreter: ``-m MODULE``, a script, or a program by its path."""
    while arguments[0] in ("-u", "-I"):
        if arguments.pop(0) == "-u":
            unbuffered()
    first = arguments[0]
    if first == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif first in ("-", "-c"):
        sys.path.insert(0, "")
        exec(sys.stdin.read() if first == "-" else arguments[1], {"__name__": "__main__"})
    elif Path(first).suffix != ".py" and is_python(first):
        run(arguments)
    else:
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(os.path.abspath(first)))
        runpy.run_path(first, run_name="__main__")


def unbuffered() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]


def run(arguments: list[str]) -> None:
    """Runs a program of Python's."""
    name, sys.argv = os.path.basename(arguments[0]), arguments
    if name.startswith("python"):
        python(arguments[1:])
    elif name == "deepspeed":  # a script, and no entry point
        importlib.import_module("deepspeed.launcher.runner").main()
    else:
        sys.exit(SCRIPTS[name].load()())


def become(arguments: Sequence[str], variables: Mapping[str, str]) -> NoReturn:
    """Runs a program to its end as this process, as an exec would."""
    code = 1
    try:
        keep_as_it_is(arguments, variables)
        prepare(arguments, variables)
        run(list(arguments))
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code & 0xFF if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        with contextlib.suppress(OSError):
            sys.stdout.flush()  # the interpreter writes what was printed before, and then the traceback
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    finally:
        end_as(code)


def end_as(code: int) -> NoReturn:
    """As the interpreter ends; negative: by a signal."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code)


def prepare(arguments: Sequence[str], variables: Mapping[str, str]) -> None:
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):  # nohup ignores one
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as the interpreter does when it starts
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    atexit._clear()
    gc.freeze()  # what the parent has left open must not be closed here, by numbers that now are others'
    if "fairseq" not in sys.modules:  # else what is registered with it would be registered twice
        import_anew()
    # what the parent's streams know of their files, such as that one can seek in them, is not true of these
    encoding, _, errors = variables.get("PYTHONIOENCODING", "utf-8").partition(":")
    sys.stdout = open(1, "w", encoding=encoding, errors=errors or None, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding=encoding, errors="backslashreplace", closefd=False)  # noqa: SIM115
    set_variables(variables)
    if variables.get("PYTHONUNBUFFERED"):
        unbuffered()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    # torch makes its pool of threads anew in a fork when it is next asked for, and fails if two threads ask at once
    sys.modules["torch"].set_num_threads(1)
    record = json.dumps({"arguments": list(arguments), "variables": dict(variables)})
    note(record)
    os.register_at_fork(after_in_child=lambda: note(record))  # as /proc shows the same of both


def import_anew() -> None:
    """Lets the program import our package, but for what is as it would be then."""
    if KEPT and sys.modules[f"{OURS[0]}.method.methods"]._imported:
        KEPT.clear()  # a plug-in of the parent's may have changed any of them
    for name in [name for name in sys.modules if is_ours(name)]:
        del sys.modules[name]
    if not KEPT:
        return
    errors = sys.modules[f"{OURS[0]}.errors"]
    errors.spell_options(errors.as_flag)
    for module, names in LEFT.items():
        for name in names if f"{OURS[0]}.{module}" in KEPT else ():
            getattr(sys.modules[f"{OURS[0]}.{module}"], name).clear()
    registered = sys.modules[f"{OURS[0]}.method.rules"].OUTER_RULES
    for name in registered.keys() - OWN_RULES:
        del registered[name]


def set_variables(variables: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:] = [*filter(None, variables.get("PYTHONPATH", "").split(":")), *INSTALLED]


def is_ours(name: str) -> bool:
    """Whether a program imports this module of ours itself."""
    return name.split(".")[0] in OURS and name not in KEPT


def note(record: str) -> None:
    """For ``forking.command_line``."""
    path = FOLDER / f"{os.getpid()}.json"
    path.with_suffix(".partial").write_text(record)
    path.with_suffix(".partial").replace(path)  # it may be read at any time


def place(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Gives the files these numbers, and closes all others."""
    above = max(numbers) + 1
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, above) for file in files]
    for number, file in zip(numbers, moved, strict=True):
        os.dup2(file, number)
    close_but(numbers)


def close_but(numbers: Sequence[int]) -> None:
    """Closes all others that are open. Their numbers stay taken: an object of the parent's that is freed here later, as
    of torchrun's, would close what has its number then."""
    kept = {0, 1, 2, *numbers}
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in {int(name) for name in os.listdir("/proc/self/fd")} - kept - {nothing}:
        os.dup2(nothing, number, inheritable=False)
    os.close(nothing)


class Nested(Forked):
    """A process that a fork starts, as a fork of that; once that has fairseq, as a fork of what it was before: what our
    package and a model of the job have registered with fairseq would be there already."""

    folder_for = staticmethod(lambda words: BEFORE.get(os.getpid()))

    def __init__(self, args: Any, **others: Any) -> None:
        words = [args] if isinstance(args, (str, bytes)) else [os.fsdecode(word) for word in args]
        if "fairseq" in sys.modules or others.get("shell") or not is_python(os.fsdecode(words[0])) or "-c" in words[:3]:
            super().__init__(args, **others)
            return
        first, numbers = others.pop("preexec_fn", None), list(others.get("pass_fds", ()))
        variables = dict(os.environ if others.get("env") is None else others["env"])

        def fork() -> None:
            close_but(numbers)  # also that by which the other process learns of the exec
            if first is not None:
                first()
            become(words, variables)

        sys.stdout.flush()
        super().__init__(args, preexec_fn=fork, **others)


def keep_as_it_is(arguments: Sequence[str], variables: Mapping[str, str]) -> None:
    """Leaves a fork of this process, which ends with it, and of which :class:`Nested` makes forks. None is left of what
    comes from such a fork itself, of a launcher, which has no fairseq, and of its workers, which start no server."""
    launched = "FAIRSEQ_ASYNC_WORKER" in variables or os.path.basename(arguments[0]) == "fairseq-async"
    if "fairseq_cli.train" not in MODULES or None in BEFORE or launched:
        return
    folder = Path(tempfile.mkdtemp(dir=FOLDER))
    listener = listening(folder)
    reader, writer = os.pipe()  # which is closed when this process has ended
    BEFORE[os.getpid()] = folder
    if os.fork() == 0:
        BEFORE[None] = folder
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        (FOLDER / f"{os.getpid()}.json").unlink(missing_ok=True)  # of the process that this one is a fork of
        os.dup2(reader, 0)
        for number in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        close_but([listener.fileno()])
        serve(listener)
    os.close(reader)
    listener.close()


def listening(folder: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.listen(64)
    return listener


def execve(path: str, arguments: Sequence[str], variables: Mapping[str, str]) -> None:
    if not is_python(path):
        EXECVE(path, arguments, variables)
    sys.stdout.flush()
    numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    close_but([number for number in numbers if is_inherited(number)])
    become([path, *arguments[1:]], variables)


def is_inherited(number: int) -> bool:
    try:
        return os.get_inheritable(number)
    except OSError:
        return False  # that of the list itself


def answer(asking: socket.socket) -> None:
    """Forks; the child becomes one of the process that asks, since the one between them ends.

    For a stand-in (``fork_client.py``), which asks from elsewhere, the one between them stays.
    """
    size = int.from_bytes(asking.recv(4, socket.MSG_WAITALL), "big")
    text, files, _, _ = socket.recv_fds(asking, 1, 250)
    asked = json.loads(text + asking.recv(size - 1, socket.MSG_WAITALL))
    if "modules" in asked:
        if os.fork() == 0:
            try:
                grow(asked, files)
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
        for file in files:
            os.close(file)
        asking.sendall(bytes(4))
        return
    reader, writer = os.pipe()
    between = os.fork()
    if between == 0:
        child = os.fork()
        if child == 0:
            begin(asked, files)
        os.write(writer, child.to_bytes(4, "big"))
        if asked["parent"] is None:
            place([asking.fileno()], [3])
            watch(socket.socket(fileno=3), child)
        os._exit(0)
    for file in (writer, *files):
        os.close(file)
    told = os.read(reader, 4)
    os.close(reader)
    if asked["parent"] is not None:
        os.waitpid(between, 0)
    asking.sendall(told)


def watch(stand_in: socket.socket, child: int) -> None:
    """Tells a stand-in how its program has ended, or ends that with it."""
    process = os.pidfd_open(child)
    if stand_in in select.select([stand_in, process], [], [])[0]:
        os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(OSError):
        stand_in.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "big", signed=True))


def begin(asked: dict[str, Any], files: Sequence[int]) -> NoReturn:
    if asked["session"]:
        os.setsid()
    if asked["parent"] is not None:
        await_parent(asked["parent"])
        os.sched_setaffinity(0, os.sched_getaffinity(asked["parent"]))
    if asked["network"] is not None:
        enter_network(asked["network"])
    place(files, asked["files"])
    os.chdir(asked["directory"])
    become(asked["arguments"], asked["variables"])


def enter_network(name: str) -> None:
    with open(f"/var/run/netns/{name}") as namespace:
        if ctypes.CDLL(None).setns(namespace.fileno(), 0) != 0:
            os._exit(1)


def await_parent(parent: int) -> None:
    deadline = time.monotonic() + 10
    while os.getppid() != parent:
        if time.monotonic() > deadline:
            os._exit(1)  # that has been killed
        time.sleep(0.0005)


def serve(listener: socket.socket) -> None:
    while True:
        ready, _, _ = select.select([listener, 0], [], [])
        if 0 in ready:
            os._exit(0)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # those between us and a stand-in's program
                pass
        with listener.accept()[0] as asking:
            try:
                answer(asking)
            except (OSError, ValueError):
                pass  # who asked has been killed


def parse_flags() -> None:
    """As a process of fairseq begins: Hydra looks for its plug-ins the first time, and its parser makes its tables."""
    options, utils = map(importlib.import_module, ("fairseq.options", "fairseq.dataclass.utils"))
    args = options.parse_args_and_arch(options.get_training_parser(), ["", "--arch", "transformer"])
    with warnings.catch_warnings():  # a fork gives them again
        utils.convert_namespace_to_omegaconf(args)


def make_parsers() -> None:
    """Those of all messages: to make them in its first exchange takes a process as long as a dozen short steps."""
    parsing, spec = (sys.modules[f"{OURS[0]}.{name}"] for name in ("protocol.parsing", "method.spec"))
    for message in (*get_args(parsing.Request), *get_args(parsing.Answer), parsing._REQUEST, parsing._ANSWER):
        parsing._adapter(message)
    spec._adapter()


def grow(asked: dict[str, Any], files: Sequence[int]) -> NoReturn:
    """Imports more, and forks for others from then on, beside the process that this one is a fork of."""
    place(files, asked["files"])
    set_variables(asked["variables"])
    import_and_serve(Path(asked["serves"]), asked["modules"])


def import_and_serve(folder: Path, modules: Sequence[str]) -> NoReturn:
    global FOLDER, MODULES
    FOLDER, MODULES = folder, list(modules)
    sys.modules["torchaudio"] = None  # type: ignore[assignment]  # as our plugin does before transformers is imported
    for name in MODULES:
        with contextlib.suppress(ImportError):  # of an extra that is not installed: nothing will import it
            importlib.import_module(name)
    del sys.modules["torchaudio"]
    frameworks = importlib.import_module("tests.helpers.frameworks")
    sys.modules["torch"].set_num_threads(1)
    frameworks.seed_what_is_here()
    frameworks.quicken()
    if "fairseq" in sys.modules:
        parse_flags()
    if "deepspeed" in sys.modules:
        importlib.import_module("cpuinfo").get_cpu_info()
    sys.meta_path.insert(0, Hidden())
    package = Path(__file__).parents[2] / OURS[0]
    for layer in (*SHARED, *(ours for theirs, ours in WITH.items() if theirs in sys.modules)):
        for path in sorted((package / layer).rglob("*.py")) or [package / layer]:
            parts = path.relative_to(package.parent).with_suffix("").parts
            if "programs" not in parts:
                importlib.import_module(".".join(parts).removesuffix(".__init__"))
    # but the programs, which runpy imports itself
    KEPT.update(name for name in sys.modules if name.startswith(f"{OURS[0]}.") and ".programs" not in name)
    OWN_RULES.update(sys.modules[f"{OURS[0]}.method.rules"].OUTER_RULES)
    make_parsers()
    listener = listening(FOLDER)
    gc.collect()
    gc.freeze()
    (FOLDER / "ready").touch()
    serve(listener)
    os._exit(0)


def main() -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for those who ask
    subprocess.Popen, os.execve = Nested, execve  # type: ignore[misc,assignment]  # before others take them by name
    import_and_serve(FOLDER, MODULES)


if __name__ == "__main__":
    main()
