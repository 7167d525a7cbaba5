"""Device operators. Import the subpackage of the operator you need."""
