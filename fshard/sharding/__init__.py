"""WHERE: meshes, specs, rules, layouts and plans. Pure arithmetic: no process group, no device, no parameter values."""
