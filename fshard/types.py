"""The classes of what functions of fshard return, for annotations: no program makes them itself."""

from fshard.checkpoint.checkpointer import Restored
from fshard.parts.grad import ValueAndGrad
from fshard.parts.step_function import Step
from fshard.played.virtual import VirtualMesh
from fshard.proof.verification import Verified
from fshard.schedule.auto import Choice
from fshard.schedule.step_trace import Trace
from fshard.training.evaluate import EvalStep
from fshard.training.metrics import Metrics
from fshard.training.train_step import TrainStep

__all__ = [
    "Choice",
    "EvalStep",
    "Metrics",
    "Restored",
    "Step",
    "Trace",
    "TrainStep",
    "ValueAndGrad",
    "Verified",
    "VirtualMesh",
]


def __dir__() -> list[str]:
    return sorted(__all__)
