"""The router's request machine: events in, actions out; from a request's submission to its one end.

`dispatcher` is the way in. `attempt` has the states of one attempt and its legs, `retry` decides when another attempt
is made, `placement` chooses its workers, and `request` keeps what the client was given.
"""
