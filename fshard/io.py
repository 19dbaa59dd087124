"""States from and to the formats of other libraries, leaf by leaf; ``fs.Checkpointer`` has fshard's own."""

from fshard.interchange.changes import Change, Exporter
from fshard.interchange.dcp import load_dcp
from fshard.interchange.dcp_write import save_dcp
from fshard.interchange.dtensors import from_dtensor, to_dtensor
from fshard.interchange.export import export
from fshard.interchange.hf import load_hf, save_hf
from fshard.interchange.rename import Rename
from fshard.interchange.state_dicts import from_state_dict, to_optim_state_dict, to_state_dict

__all__ = [
    "Change",
    "Exporter",
    "Rename",
    "export",
    "from_dtensor",
    "from_state_dict",
    "load_dcp",
    "load_hf",
    "save_dcp",
    "save_hf",
    "to_dtensor",
    "to_optim_state_dict",
    "to_state_dict",
]


def __dir__() -> list[str]:
    return sorted(__all__)
