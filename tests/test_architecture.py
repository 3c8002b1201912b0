"""The house: imports go one way, the package loads lightly, and docs say what signatures say."""

from __future__ import annotations

import ast
import dataclasses
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "dcp_lab"

# Rooms from the bottom up: a room imports from the rows above its own, never from those below.
# A new room gets its place here.
LEVELS = (
    ("state", "sharding", "files"),
    ("reference", "kernels"),
    ("ops", "testing"),
    ("reducers",),
    ("graphs",),
    ("stack",),
    ("peers", "bench", "analysis", "plots", "serving", "vllm_plugin"),
    ("notebooks",),
    ("cli", "doctor"),
)
# In this row measuring and reading what was measured use each other's modules, without circles.
SHARED_LEVEL = 6
LEVEL_OF = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}

# Only these know the servers and their kernels, and only inside functions.
KNOW_VLLM = ("vllm_plugin", "serving", "peers")
GUESTS = ("vllm", "aiter", "flashinfer")
# Dependencies that no line of the package imports, and what they are for.
TOOLS = {
    "ipykernel": "runs the notebooks' cells",
    "ipywidgets": "progress bars inside notebooks",
    "jupyterlab": "make jupyter",
    "pyarrow": "strings and Parquet in pandas",
    "seaborn": "a reader's own figures on the tables",
}
# Distribution -> module, where they differ.
MODULES = {"jupyter-client": "jupyter_client", "pillow": "PIL", "pyyaml": "yaml"}


@dataclasses.dataclass(frozen=True)
class Import:
    """One import: by which module, of what, and whether it waits for a call."""

    module: str
    target: str
    inside_function: bool
    line: int

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


def public_homes() -> dict[str, str]:
    """Return the modules that dcp_lab's lazy names load, from its source."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "_HOMES":
            return ast.literal_eval(node.value)
    raise AssertionError("dcp_lab/__init__.py: _HOMES not found")


HOMES = public_homes()


def sources() -> dict[str, ast.Module]:
    """Return module name -> syntax tree of the whole package."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(), filename=str(path))
    return found


SOURCES = sources()


def is_type_checking(node: ast.AST) -> bool:
    """Return whether this is an `if TYPE_CHECKING:`, whose imports never run."""
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports_of(module: str, tree: ast.Module) -> Iterator[Import]:
    """Yield every import of a module that can run."""

    def walk(node: ast.AST, inside: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if is_type_checking(child):
                continue
            targets: list[str] = []
            if isinstance(child, ast.Import):
                targets = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{module}:{child.lineno}: relative import"
                targets = [resolve(child.module, alias.name) for alias in child.names]
            for target in targets:
                yield Import(module, target, inside, child.lineno)
            function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from walk(child, inside or function)

    yield from walk(tree, False)


def resolve(source: str, name: str) -> str:
    """Return the module that `from source import name` loads."""
    if source == "dcp_lab" and name in HOMES:
        return HOMES[name]
    whole = f"{source}.{name}"
    return whole if whole in SOURCES else source


IMPORTS = [entry for module, tree in SOURCES.items() for entry in imports_of(module, tree)]


def room_of(module: str) -> str:
    """Return 'ops' for 'dcp_lab.ops.decode', '' for the package itself."""
    room = module.split(".")[1] if "." in module else ""
    return "plots" if room.startswith("plots_") else room


def inner(entry: Import) -> bool:
    return entry.target.split(".")[0] == "dcp_lab"


# ---- imports go one way ---------------------------------------------------------------------


def test_every_room_has_its_place():
    """A folder or module of the package that LEVELS does not know has no rule."""
    assert {room_of(module) for module in SOURCES} - {""} <= set(LEVEL_OF)


def test_imports_go_one_way():
    """No room imports from a room above it or beside it, not even inside a function."""
    wrong = []
    for entry in filter(inner, IMPORTS):
        here, there = room_of(entry.module), room_of(entry.target)
        if here == there or not {here, there} <= LEVEL_OF.keys():
            continue
        beside = LEVEL_OF[here] == LEVEL_OF[there] == SHARED_LEVEL
        if not beside and LEVEL_OF[there] >= LEVEL_OF[here]:
            wrong.append(str(entry))
    assert wrong == []


def test_no_two_modules_import_each_other():
    """Module by module there is no circle, however long, among imports at load time."""
    edges: dict[str, set[str]] = {module: set() for module in SOURCES}
    for entry in filter(inner, IMPORTS):
        # a package's __init__ gathers its own modules, which load it first
        own = entry.target.startswith(f"{entry.module}.") or entry.module.startswith(
            f"{entry.target}."
        )
        if not entry.inside_function and not own and entry.target != entry.module:
            edges[entry.module].add(entry.target)

    def circle(module: str, path: tuple[str, ...]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        for target in sorted(edges[module]):
            if found := circle(target, (*path, module)):
                return found
        return []

    assert [found for module in edges if (found := circle(module, ()))] == []


def test_the_package_itself_loads_nothing_of_its_rooms():
    """dcp_lab/__init__.py names its rooms and imports none of them."""
    assert [str(e) for e in IMPORTS if e.module == "dcp_lab" and inner(e)] == []


def test_only_the_servers_rooms_know_vllm_and_aiter():
    """vLLM and AITER are imported by plugin, serving and peers alone, inside functions."""
    wrong = []
    for entry in IMPORTS:
        if entry.target.split(".")[0] in GUESTS:
            known = room_of(entry.module) in KNOW_VLLM
            if not (known and entry.inside_function):
                wrong.append(str(entry))
    assert wrong == []


def test_the_reference_shares_nothing_with_kernels():
    """The oracle imports torch, the result type and the shard rule: no triton, no index helper."""
    allowed = {"torch", "dcp_lab.state", "dcp_lab.sharding"}
    targets = {e.target for e in IMPORTS if e.module == "dcp_lab.reference"}
    third = {t for t in targets if t.split(".")[0] not in sys.stdlib_module_names}
    assert third <= allowed


# ---- loading is light -----------------------------------------------------------------------

BLOCK = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {blocked!r}:
            raise ModuleNotFoundError(f'blocked: {{name}}', name=name)
sys.meta_path.insert(0, Blocked())
"""


def run_fresh(code: str, *blocked: str) -> str:
    """Return what code prints in a fresh interpreter that cannot import `blocked`."""
    done = subprocess.run(
        [sys.executable, "-c", BLOCK.format(blocked=set(blocked)) + code],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_loads_nothing_heavy():
    """`import dcp_lab` loads none of torch, triton, vllm, AITER, pandas."""
    heavy = ("torch", "triton", "vllm", "aiter", "pandas", "matplotlib")
    code = f"import dcp_lab; print([n for n in {heavy!r} if n in sys.modules])"
    assert run_fresh(code, "triton", "vllm", "aiter") == "[]"


def test_everything_but_kernels_works_without_triton():
    """Oracle, shards, tables, figures and the command line do without triton, vllm and AITER."""
    code = """
import dcp_lab.analysis.tables, dcp_lab.bench.costs, dcp_lab.cli, dcp_lab.doctor, dcp_lab.plots
from dcp_lab import AttnState, Shard
from dcp_lab.reference import reference_decode
print(Shard(rank=1, size=2).local_position(5), AttnState.__name__)
"""
    assert run_fresh(code, "triton", "vllm", "aiter") == "2 AttnState"


def test_without_triton_an_op_says_what_is_missing():
    """Asking for an op then names triton instead of failing somewhere inside."""
    code = """
import dcp_lab
try:
    dcp_lab.paged_decode
except ModuleNotFoundError as error:
    print(error.name)
"""
    assert run_fresh(code, "triton") == "triton"


@pytest.mark.parametrize("name", sorted(HOMES))
def test_public_names_live_where_they_say(name):
    """Each lazy name is defined or gathered in the module that _HOMES gives for it."""
    tree = SOURCES[HOMES[name]]
    defined = {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)
    }
    assert name in defined


# ---- dependencies ---------------------------------------------------------------------------


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def module_names(requirements: list[str]) -> dict[str, str]:
    """Return module -> distribution for these requirement lines."""
    names = [Requirement(line).name for line in requirements]
    return {MODULES.get(name, name.replace("-", "_")): name for name in names}


def test_what_is_imported_is_a_dependency():
    """Nothing works only because something else happened to bring it along."""
    declared = module_names(project()["dependencies"]).keys() | {"torch", "triton"}
    used: dict[str, str] = {}
    for entry in IMPORTS:
        top = entry.target.split(".")[0]
        if top not in sys.stdlib_module_names and top not in ("dcp_lab", *GUESTS):
            used.setdefault(top, str(entry))
    assert {top: where for top, where in used.items() if top not in declared} == {}


def test_every_dependency_is_used():
    """What no module and no notebook imports is a tool with a reason, or it goes."""
    used = {entry.target.split(".")[0] for entry in IMPORTS}
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        used |= set(re.findall(r'"(?:import|from) (\w+)', path.read_text()))
    declared = module_names(project()["dependencies"])
    unused = {name for module, name in declared.items() if module not in used}
    assert unused == set(TOOLS)


def test_the_command_is_installed():
    """`dcp-lab` is the entry point of dcp_lab.cli."""
    (command,) = (
        entry
        for entry in importlib.metadata.entry_points(group="console_scripts")
        if entry.name == "dcp-lab"
    )
    assert command.value == "dcp_lab.cli:main" == project()["scripts"]["dcp-lab"]
    assert callable(command.load())


# ---- docs say what signatures say -----------------------------------------------------------


def public_functions() -> Iterator[tuple[str, ast.FunctionDef, ast.ClassDef | None]]:
    """Yield every public function and method with its full name."""
    for module, tree in SOURCES.items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                yield f"{module}.{node.name}", node, None
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                for child in node.body:
                    public = isinstance(child, ast.FunctionDef) and not child.name.startswith("_")
                    if public:
                        yield f"{module}.{node.name}.{child.name}", child, node


def is_kernel(node: ast.FunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)


PUBLIC = list(public_functions())


def arguments_of(node: ast.FunctionDef) -> list[str]:
    listed = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    named = [argument.arg for argument in listed if argument.arg not in ("self", "cls")]
    starred = [argument.arg for argument in (node.args.vararg, node.args.kwarg) if argument]
    return named + starred


def documented_arguments(docstring: str) -> list[str] | None:
    """Return the names under `Args:`, None without such a section."""
    section = re.search(r"^ *Args:\n((?:^ +\S.*\n?|^\n)+)", docstring, re.M)
    if section is None:
        return None
    lines = section.group(1).splitlines()
    indent = len(lines[0]) - len(lines[0].lstrip())
    names: list[str] = []
    for line in lines:
        if line.strip() and len(line) - len(line.lstrip()) < indent:
            break
        entry = re.match(rf" {{{indent}}}((?:\*{{0,2}}\w+(?:, )?)+)(?: \([^)]*\))?:", line)
        if entry:
            names += [name.strip().lstrip("*") for name in entry.group(1).split(",")]
    return names


def test_docstrings_name_the_arguments_that_there_are():
    """An `Args:` section lists the arguments of the signature, each once."""
    wrong = {}
    for name, node, _ in PUBLIC:
        documented = documented_arguments(ast.get_docstring(node) or "")
        if documented is not None and sorted(documented) != sorted(arguments_of(node)):
            wrong[name] = (documented, arguments_of(node))
    assert wrong == {}


def test_public_functions_are_documented_and_typed():
    """Whoever calls it finds a first line, a type for each argument and one for the result."""
    wrong = []
    for name, node, owner in PUBLIC:
        if is_kernel(node):
            continue
        inherits = owner is not None and owner.bases
        if not ast.get_docstring(node) and not inherits:
            wrong.append(f"{name}: no docstring")
        listed = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        untyped = [a.arg for a in listed if a.annotation is None and a.arg not in ("self", "cls")]
        if untyped or node.returns is None:
            wrong.append(f"{name}: no type for {', '.join(untyped) or 'the result'}")
    assert wrong == []
