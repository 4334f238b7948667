"""A Llama of our own and the LightningModule around it."""

from lightning_5d.models.config import LlamaConfig, RopeScaling
from lightning_5d.models.llama import Llama
from lightning_5d.models.module import LlamaModule

__all__ = ["Llama", "LlamaConfig", "LlamaModule", "RopeScaling"]
