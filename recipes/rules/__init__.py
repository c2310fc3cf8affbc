"""Rules that are rarely used, each a plug-in of the package: ``FAIRSEQ_ASYNC_PLUGINS`` names their file."""
