"""What tests of several rooms share: pools of gloo processes, small models, and training in one plain process."""
