"""WHEN: the ops of one step in order, as a value: built, checked, printed, parsed. Pure Python."""

from fshard.schedule.build import build
from fshard.schedule.check import check
from fshard.schedule.costs import Costs, Link
from fshard.schedule.ops import Call, GroupInfo, Op, Program
from fshard.schedule.policy import Policy
from fshard.schedule.schedule import Schedule, parse
from fshard.schedule.schedule_memory import ScheduleMemory
from fshard.schedule.simulate import Simulation, simulate
from fshard.schedule.step_program import Local, Pass, StepProgram
from fshard.schedule.step_trace import Trace
from fshard.schedule.transfers import Transfer

__all__ = [
    "Call",
    "Costs",
    "GroupInfo",
    "Link",
    "Local",
    "ScheduleMemory",
    "Op",
    "Pass",
    "Policy",
    "Program",
    "Schedule",
    "Simulation",
    "StepProgram",
    "Trace",
    "Transfer",
    "build",
    "check",
    "parse",
    "simulate",
]
