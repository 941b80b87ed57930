"""A child process that holds torch: started, asked and killed by its parent service.

Parent and child exchange messages over a socket pair.
"""
