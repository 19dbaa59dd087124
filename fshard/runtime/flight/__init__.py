"""The flight recorder: which op each rank came to, and when; files of that, their reader, and who waits for whom."""
