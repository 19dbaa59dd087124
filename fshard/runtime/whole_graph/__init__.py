"""Steps as CUDA graphs: ``Policy(graph=)``. No other room imports this one unless it is asked for."""

from fshard.runtime.whole_graph.graph_runner import GraphRunner
from fshard.runtime.whole_graph.step_graph import graph_problems

__all__ = ["GraphRunner", "graph_problems"]
