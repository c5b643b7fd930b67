"""Seals: one small file says that a folder or a file is whole. Below the verbs that look and those that write, which both ask here.

document         what a seal says, its text, and the way back: `holdfast.seal.json`; as one more file of a step's plan
check            find the seal of something, see whether everything is there, compare every digest
recorded         digests of whole files that other programs record: names of blobs, SHA256SUMS; compare them
make             digest and sync what is there, and write the seal last; take one away
"""
