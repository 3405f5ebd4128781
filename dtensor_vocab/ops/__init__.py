"""One file per op: formula, operators, gradient, public function."""
