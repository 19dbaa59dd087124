"""One step on all ranks: from its program to what they decide together."""

from fshard.runtime.steps.consensus import Verdict, scalar, widened
from fshard.runtime.steps.decide import Decisions
from fshard.runtime.steps.failures import raise_failure, refuse_compiling, refuse_transforms
from fshard.runtime.steps.pass_spec import PassSpec
from fshard.runtime.steps.programs import Prepared, Programs, make_programs
from fshard.runtime.steps.records import Latest, Outcome, StepRequest
from fshard.runtime.steps.runner import Runner
from fshard.runtime.steps.step_options import Options

__all__ = [
    "Decisions",
    "Latest",
    "Options",
    "Outcome",
    "PassSpec",
    "Prepared",
    "Programs",
    "StepRequest",
    "Runner",
    "Verdict",
    "make_programs",
    "raise_failure",
    "refuse_compiling",
    "refuse_transforms",
    "scalar",
    "widened",
]
