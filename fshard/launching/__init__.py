"""``fs.launch``: a function of a notebook or a script on real ranks, in processes that end with it."""
