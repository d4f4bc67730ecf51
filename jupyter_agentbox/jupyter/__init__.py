"""Classes that Jupyter loads by name: the provisioner, the server extension, kernelspecs, contents, terminals."""
