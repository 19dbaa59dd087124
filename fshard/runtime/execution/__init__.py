"""Finding a program, the loop over a schedule's ops, and what each op does."""
