"""Names of the ways to cut parameters over ranks, which are one here."""

from cai_apps.compat.colossalai.zero import ShardStrategy

BucketTensorShardStrategy = TensorShardStrategy = ShardStrategy

__all__ = ["BucketTensorShardStrategy", "TensorShardStrategy"]
