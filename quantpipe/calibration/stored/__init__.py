"""What a build leaves on disk: the manifest, and blocks that later runs read."""
