"""What runs in the process of ipykernel. Its modules are loaded by ``launch_ipykernel`` and find each other there."""
