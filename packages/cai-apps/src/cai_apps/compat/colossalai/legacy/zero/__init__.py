"""Contexts in which models of the first generation are made for ZeRO."""

from cai_apps.compat.colossalai.zero import ShardStrategy, ZeroInitContext

BucketTensorShardStrategy = TensorShardStrategy = ShardStrategy

__all__ = ["BucketTensorShardStrategy", "TensorShardStrategy", "ZeroInitContext"]
