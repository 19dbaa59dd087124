"""Orders of pipelines: which stage computes what of which microbatch, and when, as plain data. Pure Python."""

from fshard.pipeline.check_order import check_order
from fshard.pipeline.cut import cut_units
from fshard.pipeline.named_orders import make_order
from fshard.pipeline.order_clock import bubble, times
from fshard.pipeline.order_csv import parse_csv
from fshard.pipeline.orders import Action, PipelineOrder, parse

__all__ = [
    "Action",
    "PipelineOrder",
    "bubble",
    "check_order",
    "cut_units",
    "make_order",
    "parse",
    "parse_csv",
    "times",
]
