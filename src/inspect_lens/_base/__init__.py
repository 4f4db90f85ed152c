"""What several folders need and none owns: one small task per file, as its first line says."""
