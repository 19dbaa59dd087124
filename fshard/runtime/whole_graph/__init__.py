"""Steps as CUDA graphs: ``Policy(graph=)``. No other room imports this one unless it is asked for."""

from fshard.runtime.whole_graph.graph_problems import graph_problems
from fshard.runtime.whole_graph.graph_runner import GraphRunner

__all__ = ["GraphRunner", "graph_problems"]
