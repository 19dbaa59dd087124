"""The classes of what functions of fshard return, for annotations: no program makes them itself."""

from fshard.checkpoint.checkpointer import Restored
from fshard.played.virtual import VirtualMesh
from fshard.proof.report import Verified
from fshard.schedule.auto import Choice
from fshard.training.evaluate import EvalStep
from fshard.training.metrics import Metrics
from fshard.training.step import TrainStep

__all__ = ["Choice", "EvalStep", "Metrics", "Restored", "TrainStep", "Verified", "VirtualMesh"]
