"""The gRPC fronts: services that other systems drive us by, over the same models as HTTP."""
