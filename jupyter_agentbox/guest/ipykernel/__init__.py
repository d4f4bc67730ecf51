"""Run ipykernel on the link. ``launch_ipykernel`` loads these modules in ipykernel's process."""
