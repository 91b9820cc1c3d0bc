//! A virtual host for each test, and users for the tests of permissions.

use super::{Management, amqp_uri};
use std::thread;

/// A virtual host that exists as long as this value and belongs to one test.
#[derive(Debug)]
pub(crate) struct Vhost {
    name: String,
    api: Management,
}

impl Vhost {
    /// Makes the vhost and gives the user of `AMQP_URL` all rights in it.
    pub(crate) async fn new() -> Self {
        let name = unique();
        let api = Management::new(&name);
        api.add_vhost();
        let user = amqp_uri().authority.userinfo.username;
        api.set_permissions(&user, ".*", ".*", ".*");
        Self { name, api }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The AMQP URL of this vhost.
    pub(crate) fn url(&self) -> String {
        let mut uri = amqp_uri();
        uri.vhost.clone_from(&self.name);
        uri.to_string()
    }

    pub(crate) fn api(&self) -> &Management {
        &self.api
    }

    /// A new user who may, in this vhost only, do what the three regular expressions allow.
    pub(crate) fn user(&self, configure: &str, write: &str, read: &str) -> User {
        let user = User {
            name: unique(),
            password: format!("{:032x}", rand::random::<u128>()),
            vhost: self.name.clone(),
            api: self.api.clone(),
        };
        self.api.add_user(&user.name, &user.password);
        user.allow(configure, write, read);
        user
    }
}

impl Drop for Vhost {
    fn drop(&mut self) {
        // The broker closes what connections are left in it.
        self.api.try_delete(&format!("vhosts/{}", self.name));
    }
}

/// A user who exists as long as this value. Users are not part of a vhost, so they need a clean-up too.
#[derive(Debug)]
pub(crate) struct User {
    name: String,
    password: String,
    vhost: String,
    api: Management,
}

impl User {
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The AMQP URL of the vhost, as this user.
    pub(crate) fn url(&self) -> String {
        let mut uri = amqp_uri();
        uri.vhost.clone_from(&self.vhost);
        uri.authority.userinfo.username.clone_from(&self.name);
        uri.authority.userinfo.password.clone_from(&self.password);
        uri.to_string()
    }

    /// Replaces the user's permissions. The broker caches what a channel was allowed once: a change
    /// is sure to be noticed only on a new channel.
    pub(crate) fn allow(&self, configure: &str, write: &str, read: &str) {
        self.api.set_permissions(&self.name, configure, write, read);
    }
}

impl Drop for User {
    fn drop(&mut self) {
        self.api.try_delete(&format!("users/{}", self.name));
    }
}

/// A name nobody else has, and which tells the reader of a broker's log whose it was: the test
/// harness names each test's thread after the test. Needs no percent-encoding.
fn unique() -> String {
    let test = thread::current().name().unwrap_or("test").to_owned();
    let test: String =
        test.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).take(100).collect();
    format!("it.{test}.{:016x}", rand::random::<u64>())
}
