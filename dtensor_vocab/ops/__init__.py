"""One file an op: formula, operators with fakes and placements, gradient, public function."""
