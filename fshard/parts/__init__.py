"""The parts of a step, and steps that functions compose of them."""
