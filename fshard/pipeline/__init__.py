"""Orders of pipelines: which stage computes what of which microbatch, and when, as plain data. Pure Python."""

from fshard.pipeline.check_order import check_order
from fshard.pipeline.cut import cut_units
from fshard.pipeline.named_orders import make_order
from fshard.pipeline.order_clock import bubble, held, held_on_ranks, times
from fshard.pipeline.order_csv import format_csv, parse_csv, read_csv, write_csv
from fshard.pipeline.orders import Action, PipelineOrder, parse

__all__ = [
    "Action",
    "PipelineOrder",
    "bubble",
    "check_order",
    "cut_units",
    "format_csv",
    "held",
    "held_on_ranks",
    "make_order",
    "parse",
    "parse_csv",
    "read_csv",
    "times",
    "write_csv",
]
