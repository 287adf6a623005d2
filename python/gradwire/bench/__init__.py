"""`gradwire bench`: collectives and training beside gloo over TCP, in one run over one network.

`plan` says what is measured, `ground` is the network, `conductor` gives orders to one `worker` on each rank, `results` makes the
numbers and judges them, `report` and `figures` show them. `training` does the same with the example's transformer.
"""
