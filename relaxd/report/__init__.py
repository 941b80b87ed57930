"""The report of a run (`relaxd report`): curves, times and figures from the files in its folder."""
