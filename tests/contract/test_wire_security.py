"""Nothing that arrives can become code: what the bus may not call, and a right for all that can be asked of it."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import get_args, get_type_hints

import msgspec
import pytest

from flight import messages, stream_messages
from flight.security.access import Right
from flight.security.rights import NARROWED, REQUIRED, tables_of
from flight.server import ACTIONS as SERVER_ACTIONS
from flight.server import QueueServer, _put_command
from flight.storage import messages as storage_messages
from flight.storage.server import ACTIONS as STORAGE_ACTIONS
from flight.storage.server import StorageServer

ROOT = Path(__file__).resolve().parents[2]
FLIGHT = sorted((ROOT / "flight").rglob("*.py"))
WIRE = sorted(
    path
    for name in ("broker", "client", "data", "journal", "security", "server", "shared", "state", "storage")
    for path in (ROOT / "flight" / name).rglob("*.py")
)
CONTROL = sorted((ROOT / "relax" / "control").rglob("*.py"))

FORBIDDEN_CALLS = {
    *("eval", "exec", "compile", "__import__", "input", "breakpoint"),
    *("os.system", "os.popen", "os.execv", "os.execve", "os.spawnv", "os.fork", "pty.spawn"),
    *("importlib.import_module", "subprocess.getoutput", "subprocess.getstatusoutput"),
    *("pa.deserialize", "pa.deserialize_pandas", "numpy.load", "np.load", "torch.load"),
    *("yaml.unsafe_load", "msgspec.yaml.decode", "pa.ExtensionType", "pa.register_extension_type"),
}
FORBIDDEN_MODULES = {
    "pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
    "jsonpickle",
    "code",
    "codeop",
}
FLIGHT_QUESTIONS = ("list_actions", "list_flights", "get_flight_info", "get_schema")
"""What Flight itself asks, without a message of ours."""

SPAWNING = {"flight/server/sql.py"}
"""Who starts a process: one that is ours, with arguments that are ours."""


def _name(node: ast.expr) -> str:
    return ast.unparse(node)


def _calls(path: Path) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]


@pytest.mark.parametrize("path", FLIGHT + CONTROL, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_nothing_that_arrives_can_become_code(path):
    """No pickle or the like, no evaluation, no shell; the one process that is started has fixed arguments."""
    called = {_name(call.func) for call in _calls(path)}
    assert called & FORBIDDEN_CALLS == set()
    tree = ast.parse(path.read_text())
    imported = {
        alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in ([ast.alias(node.module or "")] if isinstance(node, ast.ImportFrom) else node.names)
    }
    assert imported & FORBIDDEN_MODULES == set()
    assert "subprocess" not in imported or path.relative_to(ROOT).as_posix() in SPAWNING
    keywords = [word for call in _calls(path) for word in call.keywords if word.arg == "shell"]
    assert keywords == []


@pytest.mark.parametrize("path", WIRE + CONTROL, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_text_is_a_format_string_unless_it_stands_in_the_code(path):
    """`x.format(...)`, `format(x, spec)`, `x % values` and f-strings with a computed format are for literals only."""
    tree = ast.parse(path.read_text())
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            is_literal = (
                isinstance(node.func.value, ast.Constant) or _name(node.func) == "msgspec.json.format"
            )
            if node.func.attr in ("format", "format_map") and not is_literal:
                found.append(node.lineno)
        if isinstance(node, ast.FormattedValue) and node.format_spec is not None:
            spec = node.format_spec
            if not (
                isinstance(spec, ast.JoinedStr)
                and all(isinstance(part, ast.Constant) for part in spec.values)
            ):
                found.append(node.lineno)
    assert found == []


@pytest.mark.parametrize("path", WIRE, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_message_field_is_used_as_a_path(path):
    """Files are opened by names that the server's options say, never by what a request says."""
    openers = {"open", "Path", "os.open", "os.fdopen", "pa.memory_map", "pa.OSFile", "shutil.rmtree"}
    requests = {"request", "ticket", "message", "command", "r"}
    found = [
        (call.lineno, ast.unparse(argument))
        for call in _calls(path)
        if _name(call.func) in openers
        for argument in call.args
        for part in ast.walk(argument)
        if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id in requests
    ]
    assert found == []


def _requests() -> dict[str, type]:
    """Return every message with which a client can begin: tagged ones by class, bodies of actions by action."""
    tagged = {
        name: kind
        for module in (messages, stream_messages, storage_messages)
        for name, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, messages.Request) and msgspec.inspect.type_info(kind).tag is not None
    }
    return tagged | {name: kind for name, (kind, _) in SERVER_ACTIONS.items()} | STORAGE_ACTIONS


def test_all_that_a_server_listens_to_is_known_here():
    """Each kind of ticket, descriptor and stream is looked at below, and so is each method of Flight's."""
    commands = {
        *get_args(messages.GetTicket),
        *get_args(stream_messages.Exchange),
        *get_args(get_type_hints(_put_command)["return"]),
        storage_messages.ValuesTicket,
    }
    assert {kind.__name__ for kind in commands} <= set(_requests())
    flights = {name for name in vars(QueueServer) if name.startswith(("do_", "list_", "get_"))}
    assert flights == {"do_put", "do_get", "do_exchange", "do_action", *FLIGHT_QUESTIONS}
    assert set(FLIGHT_QUESTIONS) < set(REQUIRED)


@pytest.mark.parametrize("server", [QueueServer, StorageServer])
def test_every_method_of_a_server_asks_who_calls(server):
    """Before it answers anything: what is not asked for here could be forgotten there."""
    methods = [name for name in vars(server) if name.startswith(("do_", "list_", "get_"))]
    assert [name for name in methods if "self._admit(" not in inspect.getsource(getattr(server, name))] == []


def test_every_request_needs_a_right():
    """A message or an action without an entry is refused to everybody, so this says which are missing."""
    assert set(_requests()) - set(REQUIRED) == set()
    assert set(REQUIRED) - set(_requests()) == set(FLIGHT_QUESTIONS)
    assert set(REQUIRED.values()) <= set(get_args(Right))


@pytest.mark.parametrize("name", sorted(_requests()))
def test_request_that_names_no_table_is_about_all_or_open_to_all(name):
    """Its right is needed on all tables, unless it shows each caller only what is theirs."""
    fields = {field.name for field in msgspec.inspect.type_info(_requests()[name]).fields}
    if fields & {"table", "tables"}:
        assert REQUIRED[name] != "call"
    else:
        assert REQUIRED[name] == "call" or tables_of(name, messages.Request()) == ["*"]


def test_narrowed_requests_are_there():
    """They are named by hand."""
    assert set(_requests()) >= NARROWED
