"""Configuration of a network's switches for gradwire: a queue for each traffic class, and selective dropping in each.

`plan` decides which code point goes to which queue and where each queue begins to drop, from what the transport really
sets (`gradwire.config`); `thresholds` finds those places; `linux`, `sonic`, `nvidia` and `arista` write it down for one
kind of switch each. They write text and touch nothing. Papers: MLT 4.2.2, 5.2 and appendix B; DLCP 4.2.
"""

from gradwire.switch.plan import Queue, SwitchError, SwitchPlan, make_plan

__all__ = ["Queue", "SwitchError", "SwitchPlan", "make_plan"]
