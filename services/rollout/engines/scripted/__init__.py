"""The scripted engine of a rehearsal: no model, no child process; lengths and speeds as `[rehearsal]` states them."""
