"""Orders of pipelines: which stage computes what of which microbatch, and when, as plain data. Pure Python."""

from fshard.pipeline.named_orders import make_order
from fshard.pipeline.orders import Action, PipelineOrder, parse

__all__ = ["Action", "PipelineOrder", "make_order", "parse"]
