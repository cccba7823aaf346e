"""Arrows point one way: serve -> models -> kvfunc; and what `import kvfunc` costs."""

import ast
import importlib.util
import pathlib
import subprocess
import sys

import pytest

import kvfunc

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = {"kvfunc": "kvfunc", "models": "kvfunc.models", "serve": "kvfunc.serve"}
MAY_IMPORT = {"kvfunc": set(), "kvfunc.models": {"kvfunc"},
              "kvfunc.serve": {"kvfunc", "kvfunc.models"}}
# What the library may use besides Python's own modules.
LIBRARY = {"jax", "numpy", "jaxtyping", "kvfunc"}
CUDA = {"jax_triton", "triton"}  # comes with kvfunc[cuda]
ORBAX = {"orbax", "etils"}  # imported by whoever makes a checkpoint


def imported(source, package):
    """Absolute names of the modules that a file imports, at any depth; from its package."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield module
            # `from kvfunc import models` names a module too.
            yield from (f"{module}.{alias.name}" for alias in node.names)


def package_of(module):
    """Which of the three packages a module belongs to; None for anything else."""
    found = [name for name in PACKAGES.values() if f"{module}.".startswith(f"{name}.")]
    return max(found, key=len, default=None)


def files(folder):
    found = sorted((ROOT / folder).rglob("*.py"))
    assert found
    return found


def test_the_reader_of_imports_sees_every_spelling():
    source = ("import kvfunc.rope as r, os\n"
              "from kvfunc.models import llama\n"
              "from . import sampler\n"
              "def f():\n    from ..models.chat import X\n")
    assert set(imported(source, "kvfunc.serve")) == {
        "kvfunc.rope", "os", "kvfunc.models", "kvfunc.models.llama", "kvfunc.serve",
        "kvfunc.serve.sampler", "kvfunc.models.chat", "kvfunc.models.chat.X"}
    assert package_of("kvfunc.serve.sampler") == "kvfunc.serve"
    assert package_of("kvfunc.servers") == "kvfunc"
    assert package_of("numpy") is None


@pytest.mark.parametrize("folder", PACKAGES)
def test_arrows_point_from_serve_to_models_to_kvfunc(folder):
    package = PACKAGES[folder]
    for path in files(folder):
        reached = {package_of(module) for module in imported(path.read_text(), package)}
        wrong = reached - MAY_IMPORT[package] - {package, None}
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


def test_the_library_needs_jax_numpy_and_jaxtyping_alone():
    for path in files("kvfunc"):
        tops = {module.split(".")[0] for module in imported(path.read_text(), "kvfunc")}
        allowed = LIBRARY | (CUDA if path.parent.name == "triton" else set()) | (
            ORBAX if path.name == "checkpoint.py" else set())
        foreign = tops - allowed - sys.stdlib_module_names
        assert not foreign, f"{path.relative_to(ROOT)} imports {foreign}"


def modules_after(statement):
    """What a fresh interpreter has loaded after a statement."""
    program = f"{statement}\nimport sys\nprint(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE,
                          text=True)
    return set(done.stdout.split())


def test_import_kvfunc_loads_nothing_until_a_name_is_used():
    loaded = modules_after("import kvfunc")
    assert "kvfunc" in loaded
    assert not {name for name in loaded if name.startswith("kvfunc.")}
    assert not {"jax", "numpy", "flax"} & loaded


def test_all_public_names_resolve_without_flax_models_or_serve():
    loaded = modules_after("from kvfunc import *")
    assert "kvfunc.attention" in loaded
    assert not {"flax", "kvfunc.models", "kvfunc.serve", "kvfunc.pallas", "jax_triton"} & loaded


def test_public_names_are_what_they_say():
    assert sorted(kvfunc.__all__) == list(kvfunc.__all__)
    for name in kvfunc.__all__:
        value = getattr(kvfunc, name)
        home = importlib.import_module(value.__module__)
        assert value.__module__.startswith("kvfunc.") and getattr(home, name) is value
        assert name in dir(kvfunc)
    with pytest.raises(AttributeError, match="module 'kvfunc' has no attribute 'evict'"):
        kvfunc.evict  # noqa: B018


def test_names_for_type_checkers_are_those_of_all():
    tree = ast.parse((ROOT / "kvfunc" / "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    assert sorted(alias.asname for node in block.body for alias in node.names) == kvfunc.__all__
