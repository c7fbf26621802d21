"""The lowering by Mosaic GPU, for Hopper: TMA, wgmma and warp specialisation."""
