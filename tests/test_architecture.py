"""The shape of the source, held by `ast`: who imports whom, sizes, names, docstrings, no machine's paths."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.source_files import ROOT, nodes_of, project_files, python_files, text_of, tree_of

PACKAGES = ("schemas", "connectors", "jobs")
# A project of its own, whose package the product imports under its own name.
LIBRARY = Path("connectors/agent_sdk")
# Parts of its modules' full names, so they hide nothing.
OF_THE_LIBRARY = {"queue", "mcp", "xml", "command"}
FILE_LINES, FUNCTION_LINES, README_LINES, RECORD_LINES, LINE_WIDTH = 400, 70, 130, 40, 112
EMPTY_NAMES = {"utils", "util", "common", "helpers", "helper", "manager", "core", "misc", "base", "stuff"}
DELTA_LIBRARIES = {"delta", "deltalake"}
DATA_FILES = Path("schemas/tables/delta_files.py")
# Writers and readers of Delta tables must agree on the progress of the views and on the files' locations.
SHARED_DELTA_FILES = {
    Path(f"schemas/tables/{name}.py") for name in ("delta_files", "fold_version", "view_progress")
}
ROOMS_ONLY, FOLDER_MODULES = ("schemas", "connectors"), 20
PURE = ("schemas/wire", "schemas/fold", "schemas/streams", "schemas/effects")
# Both serve the notebooks.
NOT_IMPORTED = {"delta-spark", "ipykernel"}
IMPURE_LIBRARIES = {"socket", "ssl", "kafka", "confluent_kafka", "deltalake"}


@cache
def imports_of(path: Path) -> tuple[tuple[str, int], ...]:
    """Each module that a file imports, and the number of dots before it."""
    found: list[tuple[str, int]] = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found += ((alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.append((node.module or "", node.level))
    return tuple(found)


def offenders(found: Iterator[str] | list[str]) -> None:
    """Fail with the list of what breaks the rule."""
    wrong = list(found)
    assert not wrong, "\n" + "\n".join(wrong)


def test_the_rules_look_at_every_package() -> None:
    for package in (*PACKAGES, "tests"):
        assert python_files(package), package


@pytest.mark.long
@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("schemas", {"connectors", "jobs", "tests"}),
        ("connectors", {"jobs", "tests"}),
        ("jobs", {"connectors", "tests"}),
    ],
)
def test_schemas_imports_nothing_of_ours_and_connectors_and_jobs_never_each_other(
    package: str, forbidden: set[str]
) -> None:
    offenders(
        f"{path} imports {module}"
        for path in python_files(package)
        for module, _ in imports_of(path)
        if module.split(".")[0] in forbidden
    )


def python_files_below(folder: Path) -> list[Path]:
    """The Python files below a folder of the checkout."""
    return [path for path in python_files() if path.is_relative_to(folder)]


@pytest.mark.requirement("AG-01")
def test_the_library_of_agents_imports_nothing_else_of_ours() -> None:
    files = python_files_below(LIBRARY)
    assert files
    offenders(
        f"{path} imports {module}"
        for path in files
        for module, _ in imports_of(path)
        if module.split(".")[0] in {*PACKAGES, "tests"}
    )


def test_spark_is_imported_by_jobs_only() -> None:
    offenders(
        f"{path} imports {module}"
        for path in python_files("schemas", "connectors")
        for module, _ in imports_of(path)
        if module.split(".")[0] in {"pyspark", "py4j"}
    )
    assert any(module.startswith("pyspark") for path in python_files("jobs") for module, _ in imports_of(path))


def reads_delta(path: Path) -> bool:
    """Reading without a JVM (`deltalake`) is for connectors, too, in files that say so by their name."""
    return path in SHARED_DELTA_FILES or (path.parts[0] == "connectors" and path.stem.endswith("_reader"))


def test_delta_is_written_by_jobs_only() -> None:
    offenders(
        f"{path} imports {module}"
        for path in python_files("schemas", "connectors")
        for module, _ in imports_of(path)
        if module.split(".")[0] in DELTA_LIBRARIES
        and not (module.startswith("deltalake") and reads_delta(path))
    )
    writes = re.compile(
        r"\b(?:write_deltalake|convert_to_deltalake)\b|\.(?:merge|delete|vacuum|optimize|alter)\b"
    )
    offenders(
        f"{path}: {found[0]}"
        for path in python_files("schemas", "connectors")
        if reads_delta(path)
        for found in writes.finditer(text_of(path))
    )


@pytest.mark.long
def test_data_files_of_tables_are_read_by_one_file_only() -> None:
    readers = {"ParquetFile", "to_pyarrow_dataset", "to_pyarrow_table", "FileSystemDataset", "read_table"}
    readers |= {"make_fragment", "from_fragment", "parquet_dataset"}
    offenders(
        f"{path}:{node.lineno} calls {node.func.attr}, which gives a file's own types: use {DATA_FILES}"
        for path in python_files("notebooks", *PACKAGES)
        for node in nodes_of(path)
        if path != DATA_FILES and isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if node.func.attr in readers or ast.unparse(node.func) in {"ds.dataset", "dataset.dataset"}
    )


@cache
def module_files() -> dict[str, Path]:
    """The product's modules by dotted name; a package is its `__init__`."""
    found = {}
    for path in python_files(*PACKAGES):
        own = path.relative_to(LIBRARY) if path.is_relative_to(LIBRARY) else path
        parts = own.parts[:-1] if path.name == "__init__.py" else own.with_suffix("").parts
        found[".".join(parts)] = path
    return found


@cache
def imported_modules(module: str) -> frozenset[str]:
    """The product's modules that a module imports."""
    known, found = module_files(), set()
    for node in nodes_of(known[module]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inside & set(known) or {node.module}
    return frozenset(found & set(known) - {module})


def package_of(module: str) -> str:
    """The package that a module is in; of a package and of a public name at the library's root, itself."""
    package = module.rpartition(".")[0]
    is_alone = module_files()[module].name == "__init__.py" or package == "trunkline_agent"
    return module if is_alone else package


def cycles(edges: dict[str, set[str]]) -> Iterator[str]:
    """Each way from a node back to itself that is found first, as text."""
    done: set[str] = set()

    def walk(node: str, path: list[str]) -> Iterator[str]:
        if node in path:
            yield " -> ".join([*path[path.index(node) :], node])
        elif node not in done:
            for follower in sorted(edges.get(node, ())):
                yield from walk(follower, [*path, node])
            done.add(node)

    for start in sorted(edges):
        yield from walk(start, [])


def test_modules_import_each_other_in_one_direction_only() -> None:
    offenders(cycles({module: set(imported_modules(module)) for module in module_files()}))


def test_packages_import_each_other_in_one_direction_only() -> None:
    edges: dict[str, set[str]] = {}
    for module in module_files():
        package = package_of(module)
        others = {package_of(imported) for imported in imported_modules(module)} - {package}
        edges.setdefault(package, set()).update(others)
    offenders(cycles(edges))


def test_no_module_lies_outside_a_package_and_no_package_is_large() -> None:
    files = [path for path in python_files(*PACKAGES) if path.name != "__init__.py"]
    offenders(f"{path}: move it into a package" for path in files if path.parent.name in ROOMS_ONLY)
    counts = Counter(path.parent for path in files)
    offenders(f"{folder}: {n} modules" for folder, n in counts.items() if n > FOLDER_MODULES)


def test_every_package_says_what_it_is_for() -> None:
    folders = {path.parent for path in python_files(*PACKAGES)}
    offenders(
        f"{folder} has no __init__.py" for folder in folders if not (ROOT / folder / "__init__.py").is_file()
    )
    offenders(
        f"{path} has no docstring"
        for path in python_files(*PACKAGES)
        if path.name == "__init__.py" and not ast.get_docstring(tree_of(path))
    )


def test_records_and_folds_import_no_network_and_no_table_library() -> None:
    offenders(
        f"{path} imports {module}"
        for path in python_files("schemas")
        if str(path).startswith(PURE)
        for module, _ in imports_of(path)
        if module.split(".")[0] in IMPURE_LIBRARIES
    )


@pytest.mark.long
def test_imports_are_absolute() -> None:
    offenders(
        f"{path}: {'.' * dots}{name}" for path in python_files() for name, dots in imports_of(path) if dots
    )


@cache
def library_modules() -> frozenset[str]:
    """The top-level modules of the standard library and of every installed library."""
    installed = importlib.metadata.packages_distributions()
    return frozenset(sys.stdlib_module_names) | frozenset(installed) - {*PACKAGES, "tests"}


@pytest.mark.requirement("HO-04")
def test_every_dependency_is_imported_by_the_product() -> None:
    project = tomllib.loads(text_of("pyproject.toml"))["project"]
    required = {re.split(r"[\[=<>]", line)[0].lower() for line in project["dependencies"]}
    modules = {
        module.split(".")[0] for path in python_files(*PACKAGES, "notebooks") for module, _ in imports_of(path)
    }
    installed = importlib.metadata.packages_distributions()
    imported = {name.lower().replace("_", "-") for module in modules for name in installed.get(module, ())}
    assert required - imported == NOT_IMPORTED


def test_no_module_hides_one_of_the_standard_library_or_of_an_installed_library() -> None:
    offenders(
        f"{path} is named like a library"
        for path in python_files(*PACKAGES, "tests")
        for name in {path.stem, path.parent.name}
        if name in library_modules() and name not in {"__init__", "__main__"}
        if not (path.is_relative_to(LIBRARY) and name in OF_THE_LIBRARY)
    )


def test_no_module_has_a_name_that_says_nothing() -> None:
    offenders(
        f"{path}: {part}"
        for path in python_files()
        for part in (*path.parts[:-1], path.stem)
        if EMPTY_NAMES & set(part.split("_"))
    )


def test_files_are_short() -> None:
    def lines(path: Path) -> int:
        return len(text_of(path).splitlines())

    offenders(f"{path}: {lines(path)} lines" for path in python_files() if lines(path) > FILE_LINES)


def functions_of(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method of a file."""
    for node in nodes_of(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_functions_are_short() -> None:
    offenders(
        f"{path}:{node.lineno} {node.name}: {node.end_lineno - node.lineno + 1} lines"
        for path in python_files()
        for node in functions_of(path)
        if node.end_lineno is not None and node.end_lineno - node.lineno + 1 > FUNCTION_LINES
    )


def test_every_module_opens_with_a_docstring_whose_first_line_is_a_sentence() -> None:
    def first_line(path: Path) -> str:
        return (ast.get_docstring(tree_of(path)) or "").split("\n")[0]

    offenders(
        f"{path}: {first_line(path)!r}"
        for path in python_files()
        if path.name != "__init__.py" and len(first_line(path)) < 15
    )


def public_definitions(
    body: list[ast.stmt], prefix: str = ""
) -> Iterator[tuple[str, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Public classes, functions and methods, with their qualified names."""
    for node in body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or node.name[0] == "_":
            continue
        yield prefix + node.name, node
        if isinstance(node, ast.ClassDef):
            yield from public_definitions(node.body, f"{prefix}{node.name}.")


def test_public_classes_functions_and_methods_say_what_they_promise() -> None:
    offenders(
        f"{path}:{node.lineno} {name}"
        for path in python_files(*PACKAGES)
        for name, node in public_definitions(tree_of(path).body)
        if ast.get_docstring(node) is None
    )


def test_tests_are_no_package_and_their_names_are_sentences() -> None:
    offenders([str(path) for path in python_files("tests") if path.name == "__init__.py"])
    offenders(
        f"{path}:{node.lineno} {node.name}"
        for path in python_files("tests")
        if path.stem.startswith("test_")
        for node in functions_of(path)
        if node.name.startswith("test_") and node.name.count("_") < 3
    )


def test_no_test_is_skipped_or_sleeps() -> None:
    words = re.compile(r"pytest\.(?:skip|importorskip|xfail|mark\.(?:skip|skipif|xfail))\b")
    itself = Path(__file__).name
    offenders(
        f"{path}: {found[0]}"
        for path in python_files("tests")
        if path.name != itself and (found := words.search(text_of(path)))
    )


# Text that belongs to one machine or network: a home, a working directory, an index of packages. Ann and Bo
# are the people of our examples.
MACHINE = re.compile(
    r"(?<![\w.$}-])/(?:home|Users|root|work|workspace|tmp|mnt|media)/(?!(?:ann|bo)\b)[\w.-]+"
    r"|\bhttps?://(?:[\w-]+\.)*(?:pypi|artifactory|nexus|jfrog|devpi|repo1?\.maven|mirrors?)[\w.-]*\.\w+[\w./-]*"
    r"|(?:--|^)(?:extra-)?index-url\b",
    re.MULTILINE,
)
TEXTS = {".py", ".md", ".toml", ".yaml", ".yml", ".conf", ".properties", ".xml", ".json", ".ipynb", ".lock", ""}


def may_show_paths(path: Path) -> bool:
    """Examples of unsafe text are paths; tests may send them."""
    return path == LIBRARY / "trunkline_agent/wire/unsafe_text.py" or path.parts[0] == "tests"


@pytest.mark.long
def test_no_file_holds_a_path_of_a_machine_or_the_address_of_a_registry() -> None:
    offenders(
        f"{path}: {found[0]}"
        for path in project_files()
        if path.suffix in TEXTS and path.parts[0] != ".ci" and not may_show_paths(path)
        for found in MACHINE.finditer(text_of(path))
    )


def test_the_readme_is_short() -> None:
    readme = ROOT / "README.md"
    assert not readme.exists() or len(readme.read_text(encoding="utf-8").splitlines()) <= README_LINES


def test_a_decision_record_is_short_beside_its_tables() -> None:
    def prose(path: Path) -> int:
        return sum(not line.startswith("|") for line in text_of(path).splitlines())

    records = [p for p in project_files() if p.parent.name == "decisions" and p.suffix == ".md"]
    offenders(f"{path}: {prose(path)} lines" for path in records if prose(path) > RECORD_LINES)
