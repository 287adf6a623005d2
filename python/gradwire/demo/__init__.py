"""`gradwire demo`: the training example over a small lossy network, gloo against gradwire, in one table and one picture.

`conductor` builds the network (`gradwire.lab`), starts one `worker` on each host and tells all of them which run to advance
by how many steps; `results` makes the numbers, `picture` draws them. What is trained is `examples/train_gpt.py` itself.
"""
