"""Transformers with rotary embedding on top of kvfunc, and the readers of their files."""

from kvfunc.models.config import ModelConfig as ModelConfig
from kvfunc.models.llama import Llama as Llama
from kvfunc.models.load import LoadedModel as LoadedModel
from kvfunc.models.load import load as load
