"""Admission: which requests are begun, when, and in which order; between the HTTP front end and the dispatcher.

`admission` is the way in, `controller` the pure core: it asks `capacity` what the workers have left, keeps what waits
in `queue`, and counts in `shares` what each tenant was given by all routers (`share_exchange` tells them of each
other).
"""
