"""A server over the scripted engine of fake.py, for the tests of the HTTP layer."""

import importlib.util
import pathlib

import httpx
import pytest


@pytest.fixture(scope="session")
def _scripted():
    path = pathlib.Path(__file__).with_name("fake.py")
    spec = importlib.util.spec_from_file_location("fake", path)
    fake = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fake)
    engine = fake.FakeEngine()
    with fake.serving(engine) as (chat, url):
        yield fake, engine, chat, url


@pytest.fixture
def served(_scripted):
    """A server that answers "hello" unless its engine is told to say something else."""
    fake, engine, chat, url = _scripted
    engine.reset()
    with httpx.Client(base_url=url, trust_env=False, timeout=10) as client:
        yield fake.Served(engine, chat, url, client)
    assert engine.open == 0
