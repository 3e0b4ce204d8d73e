"""What front ends may call: the interface of a model server, which the core and a front-end process implement."""
