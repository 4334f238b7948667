"""torch's FSDP2 machinery for plain replication. The import is private; tests/parallel/test_private_api.py notices a change."""

from torch.distributed._composable.replicate_with_fsdp import replicate

__all__ = ["replicate"]
