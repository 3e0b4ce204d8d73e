"""Decides which devices an object's pods request: the name of the resource, and the nodes that it refers to.

The scheduler of Kubernetes decides on the node, and the device plugin on the device. Here only the resource name is
chosen, and the node affinity that belongs to it: one name may mean different devices on different nodes.
"""
