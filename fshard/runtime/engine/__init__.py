"""Running a program's units on slots: the engine, what the loss function is given, and recomputation."""
